-- The experience in numbers, as it stands before a step.
--
-- in   experience, questions
--      $step             t
--      $revive_after     retired questions come back after so many steps; null: never
-- out  one row; age_mean is null where the pool is empty
SELECT
    (SELECT count(*) FROM experience) AS trajectories,
    (SELECT count(DISTINCT problem_id) FROM experience) AS questions,
    count(*) FILTER (WHERE bucket = 'easy' AND stored) AS easy,
    count(*) FILTER (WHERE bucket = 'medium' AND stored) AS medium,
    count(*) FILTER (WHERE bucket = 'hard' AND stored) AS hard,
    count(*) FILTER (
        WHERE retired_step IS NOT NULL
            AND ($revive_after IS NULL OR $step < retired_step + $revive_after)
    ) AS retired,
    (SELECT avg($step - step) FROM experience) AS age_mean
FROM (
    SELECT *, problem_id IN (SELECT problem_id FROM experience) AS stored
    FROM questions
);
