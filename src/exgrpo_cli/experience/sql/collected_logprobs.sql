-- Exact log-probabilities of the chosen trajectories under the policies that collected them.
--
-- in   chosen      those that were scored when they were collected have a collected_policy
--      $scores     scores files of the collecting steps
-- out  collected   (rollout_id, logprobs), added to
INSERT INTO collected
SELECT s.rollout_id, s.logprobs
FROM read_parquet($scores) AS s
JOIN chosen AS c ON c.rollout_id = s.rollout_id AND c.collected_policy = s.policy
WHERE s.rollout_id NOT IN (SELECT rollout_id FROM collected)
QUALIFY row_number() OVER (PARTITION BY s.rollout_id ORDER BY s.mean_entropy, s.mean_logprob) = 1;
