-- What is wrong with the rows of a step.
--
-- in   step_rows
--      $step    t
-- out  one row: rows, unjudged (how many have no verdict), and the first rollout_id, or null, that
--      is doubled, is of another step, has no verdict, or has another role
SELECT
    count(*) AS rows,
    (
        SELECT min(rollout_id)
        FROM (SELECT rollout_id FROM step_rows GROUP BY rollout_id HAVING count(*) > 1)
    ) AS doubled,
    min(rollout_id) FILTER (WHERE step <> $step) AS other_step,
    count(*) FILTER (WHERE correct IS NULL) AS unjudged,
    min(rollout_id) FILTER (WHERE correct IS NULL) AS first_unjudged,
    min(rollout_id) FILTER (WHERE role NOT IN ('fresh', 'replay')) AS other_role
FROM step_rows;
