-- Take trajectories of others into the experience: those that the rule stores.
--
-- in   import_rows       the rows of those that the step takes in, as in step_rows
--      questions, experience, problems   as they stand after the step took in what it sampled
--      $step             t
--      $samples, $batch  K and B
--      $count_replayed   which pair of counts makes the bucket
--      $revive_after     retired questions come back after so many steps; null: never
--      <store>           the rule; k and n are the question's own counts, 0 of K before its first
--                        success
-- out  experience        with the trajectories that enter
--      questions         one without a bucket that has an imported success now is hard, with 0 of 0
INSERT INTO experience BY NAME
WITH held AS (
    SELECT problem_id, CAST(count(*) AS INTEGER) AS stored
    FROM experience
    WHERE problem_id IN (SELECT problem_id FROM import_rows)
    GROUP BY problem_id
),
counts AS (
    SELECT
        problem_id,
        CASE WHEN $count_replayed THEN successes ELSE fresh_successes END AS successes,
        CASE WHEN $count_replayed THEN attempts ELSE fresh_attempts END AS attempts,
        fresh_successes,
        fresh_attempts,
        times_replayed,
        last_step,
        retired_step IS NOT NULL
            AND ($revive_after IS NULL OR $step < retired_step + $revive_after) AS retired
    FROM questions
    WHERE problem_id IN (SELECT problem_id FROM import_rows)
),
seen AS ( -- with the columns that the rule sees
    SELECT
        r.* EXCLUDE (step),
        <origin|r.rollout_id> AS origin,
        coalesce(q.successes, 0) AS k,
        CASE WHEN q.attempts > 0 THEN q.attempts ELSE $samples END AS n,
        coalesce(q.fresh_successes, 0) AS fresh_k,
        CASE WHEN q.fresh_attempts > 0 THEN q.fresh_attempts ELSE $samples END AS fresh_n,
        CAST(k AS DOUBLE) / n AS mean_reward,
        CASE WHEN n < 2 THEN 0.0 ELSE sqrt(n * mean_reward * (1 - mean_reward) / (n - 1))
        END AS std_reward,
        r.reward - mean_reward AS advantage,
        coalesce(q.times_replayed, 0) AS times_replayed,
        $step - q.last_step AS since_sampled,
        coalesce(h.stored, 0) AS stored,
        p.source,
        p.metadata,
        <of_step|'store', r.rollout_id>
    FROM import_rows AS r
    LEFT JOIN counts AS q ON q.problem_id = r.problem_id
    LEFT JOIN held AS h ON h.problem_id = r.problem_id
    LEFT JOIN problems AS p ON p.problem_id = r.problem_id
    WHERE NOT coalesce(q.retired, false)
)
SELECT
    r.rollout_id, r.problem_id, r.step, r.sample, r.tokens, r.token_hash, r.correct, r.reward,
    r.mean_entropy, r.mean_logprob, r.entropy_source, r.entropy_policy, r.part
FROM seen AS r
-- The same token ids of a question enter once, and the first ones stay.
ANTI JOIN experience AS known
    ON known.problem_id = r.problem_id AND known.token_hash = r.token_hash
WHERE <store|rollout_id>
QUALIFY row_number() OVER (
    PARTITION BY r.problem_id, r.token_hash ORDER BY r.sample, r.rollout_id
) = 1
ORDER BY r.problem_id, r.sample, r.rollout_id;

CREATE OR REPLACE TEMP TABLE promised AS
SELECT DISTINCT e.problem_id
FROM experience AS e
SEMI JOIN import_rows AS r ON r.rollout_id = e.rollout_id
WHERE e.correct
    AND e.problem_id NOT IN (SELECT problem_id FROM questions WHERE bucket IS NOT NULL);

INSERT INTO questions (problem_id, last_step, times_replayed)
SELECT problem_id, $step, 0
FROM promised
WHERE problem_id NOT IN (SELECT problem_id FROM questions);

UPDATE questions
SET bucket = 'hard', successes = 0, attempts = 0, fresh_successes = 0, fresh_attempts = 0
WHERE problem_id IN (SELECT problem_id FROM promised);
