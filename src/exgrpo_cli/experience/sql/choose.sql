-- For each question that the plan replays: the stored success to replay.
--
-- in   experience        as it stood before the step, and questions too
--      planned           (problem_id, role): the step's plan
--      unsampled         (problem_id): replay questions that the rollout stage left out
--      scored            (rollout_id, policy, mean_entropy, mean_logprob): candidates under the
--                        current policy; empty where no scores were made
--      $selection        lowest_entropy, highest_entropy, lowest_perplexity, random or newest
--      $seed, $step      of the random choice
--      $count_replayed   which pair of counts makes the bucket
-- out  chosen            one row a question: the trajectory, what it was chosen by, the bucket
CREATE OR REPLACE TEMP TABLE chosen AS
WITH candidates AS (
    SELECT
        e.problem_id,
        e.rollout_id,
        e.step,
        e.sample,
        e.part,
        e.reward,
        CASE WHEN e.entropy_source = 'score' THEN e.entropy_policy END AS collected_policy,
        -- Under the current policy where that is known, else as it was when it was collected.
        coalesce(s.mean_entropy, e.mean_entropy) AS mean_entropy,
        coalesce(s.mean_logprob, e.mean_logprob) AS mean_logprob,
        CASE WHEN s.rollout_id IS NULL THEN e.entropy_source ELSE 'score' END AS entropy_source,
        coalesce(s.policy, e.entropy_policy) AS entropy_policy,
        s.rollout_id IS NULL AS stale
    FROM experience AS e
    SEMI JOIN (SELECT problem_id FROM planned WHERE role = 'replay') AS p
        ON p.problem_id = e.problem_id
    ANTI JOIN unsampled AS u ON u.problem_id = e.problem_id
    LEFT JOIN scored AS s ON s.rollout_id = e.rollout_id
),
ranked AS (
    SELECT
        *,
        row_number() OVER best AS rank,
        count(*) OVER (PARTITION BY problem_id) AS candidates,
        count(*) FILTER (WHERE stale) OVER (PARTITION BY problem_id) AS unscored
    FROM candidates
    WINDOW best AS (
        PARTITION BY problem_id
        ORDER BY
            -- An entropy of another policy says nothing beside one of the step's own.
            CASE WHEN $selection NOT IN ('random', 'newest') THEN stale END,
            CASE $selection
                WHEN 'lowest_entropy' THEN mean_entropy
                WHEN 'highest_entropy' THEN -mean_entropy
                WHEN 'lowest_perplexity' THEN -mean_logprob -- perplexity is exp(-mean_logprob)
                WHEN 'newest' THEN -step
            END,
            CASE WHEN $selection = 'random'
                THEN md5(concat_ws(':', 'choose', $seed, $step, rollout_id))
            END,
            step, sample, rollout_id
    )
)
SELECT
    c.problem_id,
    c.rollout_id,
    c.step AS collected_step,
    c.part,
    c.reward,
    c.collected_policy, -- whose exact log-probabilities were recorded; null where none were
    c.mean_entropy,
    c.entropy_source,
    c.entropy_policy,
    c.stale,
    q.bucket,
    CASE WHEN $count_replayed THEN q.successes ELSE q.fresh_successes END AS successes,
    CASE WHEN $count_replayed THEN q.attempts ELSE q.fresh_attempts END AS attempts,
    CAST(c.rank AS INTEGER) AS rank,
    CAST(c.candidates AS INTEGER) AS candidates,
    CAST(c.unscored AS INTEGER) AS unscored -- of the candidates: not under the current policy
FROM ranked AS c
LEFT JOIN questions AS q ON q.problem_id = c.problem_id
WHERE c.rank = 1
ORDER BY c.problem_id;
