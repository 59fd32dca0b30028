-- The questions that can be replayed, each with the bucket it is drawn from.
--
-- in   experience, questions, problems (problem_id)
--      $step             the step that is being planned
--      $count_replayed   which pair of counts makes the bucket
--      $weights          uniform puts all questions into one bucket
--      $samples          K: a count k of another number of attempts n is brought to K's scale
--      $revive_after     retired questions come back after so many steps; null: never
-- out  pool_questions    (problem_id, count): count is the number of successes k out of K
CREATE OR REPLACE TEMP TABLE pool_questions AS
SELECT
    problem_id,
    CASE
        WHEN $weights = 'uniform' THEN 0
        WHEN n = $samples THEN k
        ELSE greatest(1, least($samples - 1, CAST(round(k * $samples / n) AS INTEGER)))
    END AS count
FROM (
    SELECT
        problem_id,
        CASE WHEN $count_replayed THEN successes ELSE fresh_successes END AS k,
        CASE WHEN $count_replayed THEN attempts ELSE fresh_attempts END AS n
    FROM questions
    WHERE bucket IS NOT NULL
        AND (retired_step IS NULL OR $step >= retired_step + $revive_after)
)
SEMI JOIN experience USING (problem_id)
SEMI JOIN problems USING (problem_id);
