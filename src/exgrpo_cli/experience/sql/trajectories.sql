-- Token lists of some trajectories, from the rollouts files that hold them.
--
-- in   wanted         (rollout_id): which
--      $parts         the rollouts files in which they lie, and no others
-- out  trajectories   (rollout_id, prompt_ids, token_ids, logprobs)
CREATE OR REPLACE TEMP TABLE trajectories AS
SELECT r.rollout_id, r.prompt_ids, r.token_ids, r.logprobs
FROM read_parquet($parts) AS r
SEMI JOIN wanted AS w ON w.rollout_id = r.rollout_id;
