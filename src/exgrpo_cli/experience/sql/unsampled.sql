-- Replay questions of a step's plan that were not sampled: the rollout stage leaves out prompts that
-- are too long. Their trajectories have no group to be replayed in.
--
-- in   $plan        the step's plan
--      $rollouts    its rollouts files
-- out  unsampled    (problem_id), added to
INSERT INTO unsampled
SELECT problem_id FROM read_parquet($plan) WHERE role = 'replay'
EXCEPT
SELECT problem_id FROM read_parquet($rollouts) WHERE role = 'replay';
