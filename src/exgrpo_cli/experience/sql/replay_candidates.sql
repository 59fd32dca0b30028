-- The stored trajectories of the questions that a step's plan replays.
--
-- in   $experience   experience.parquet, and $plan the step's plan
--      $step         only what was collected before it
-- out  rollout_id, problem_id, part
SELECT e.rollout_id, e.problem_id, e.part
FROM read_parquet($experience) AS e
SEMI JOIN (SELECT problem_id FROM read_parquet($plan) WHERE role = 'replay') AS p
    ON p.problem_id = e.problem_id
WHERE e.step < $step
ORDER BY e.problem_id, e.step, e.sample, e.rollout_id;
