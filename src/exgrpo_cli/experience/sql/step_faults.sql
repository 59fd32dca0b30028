-- What is wrong between the rows of a step.
--
-- in   step_rows, scored
--      $step       t
--      $verdicts   the step's verdicts files
-- out  one row: rows, verdicts (how many there are), unjudged (how many rows have none), and the first
--      rollout_id, or null, that is doubled, is of another step, has no verdict, or is scored without
--      being a rollout
SELECT
    count(*) AS rows,
    (SELECT count(*) FROM read_parquet($verdicts)) AS verdicts,
    (
        SELECT min(rollout_id)
        FROM (SELECT rollout_id FROM step_rows GROUP BY rollout_id HAVING count(*) > 1)
    ) AS doubled,
    min(rollout_id) FILTER (WHERE step <> $step) AS other_step,
    count(*) FILTER (WHERE correct IS NULL) AS unjudged,
    min(rollout_id) FILTER (WHERE correct IS NULL) AS first_unjudged,
    (SELECT min(rollout_id) FROM scored ANTI JOIN step_rows USING (rollout_id)) AS unscored
FROM step_rows;
