-- The questions that can be replayed, each with the bucket it is drawn from and its weight inside.
--
-- in   experience, questions, problems
--      $step             the step that is being planned
--      $samples, $batch  K and B
--      $count_replayed   which pair of counts makes the bucket
--      $revive_after     retired questions come back after so many steps; null: never
--      <bucket>, <question>   the rules
-- out  pool_questions    (problem_id, count, weight): count is the bucket's number
CREATE OR REPLACE TEMP TABLE pool_questions AS
WITH held AS (
    SELECT problem_id, CAST(count(*) AS INTEGER) AS stored FROM experience GROUP BY problem_id
),
seen AS (
    SELECT
        q.problem_id,
        <k|q> AS k,
        <success_rate|q> AS success_rate,
        q.times_replayed,
        $step - q.last_step AS since_sampled,
        h.stored,
        p.source,
        p.metadata,
        <of_step|'question', q.problem_id>
    FROM questions AS q
    JOIN held AS h ON h.problem_id = q.problem_id
    JOIN problems AS p ON p.problem_id = q.problem_id
    WHERE q.bucket IS NOT NULL
        AND (q.retired_step IS NULL OR $step >= q.retired_step + $revive_after)
)
SELECT *
FROM (
    SELECT problem_id, <bucket|problem_id> AS count, <question|problem_id> AS weight FROM seen
)
WHERE weight > 0;
