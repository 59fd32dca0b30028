-- The rows of one step, each with its verdict and with the entropy it is stored with.
--
-- in   $rollouts   the step's rollouts files, and $verdicts its verdicts files (scalar columns only)
--      $root       the run directory with a slash; `part` is made relative to it
--      scored      (rollout_id, policy, mean_entropy, mean_logprob): exact values of the step's own
--                  rollouts; empty where no scores were made
-- out  step_rows   one row a rollout; correct is null where a verdict is missing
CREATE OR REPLACE TEMP TABLE step_rows AS
SELECT
    r.rollout_id,
    r.problem_id,
    r.step,
    r.sample,
    r.role,
    r.tokens,
    r.token_hash,
    r.finish_reason,
    v.reward,
    v.correct,
    v.status,
    coalesce(s.mean_entropy, r.mean_entropy) AS mean_entropy,
    coalesce(s.mean_logprob, r.mean_logprob) AS mean_logprob,
    CASE WHEN s.rollout_id IS NULL THEN r.entropy_source ELSE 'score' END AS entropy_source,
    coalesce(s.policy, r.policy) AS entropy_policy,
    CASE
        WHEN starts_with(r.filename, $root) THEN substr(r.filename, length($root) + 1)
        ELSE r.filename
    END AS part
FROM read_parquet($rollouts, filename = true) AS r
LEFT JOIN read_parquet($verdicts) AS v ON v.rollout_id = r.rollout_id
LEFT JOIN scored AS s ON s.rollout_id = r.rollout_id;
