-- Mean entropies and log-probabilities under one policy, without the per-token lists.
--
-- in   $scores     scores files of one step
--      $rollouts   its rollouts files: should a trajectory be scored under several policies, the one
--                  that sampled the step counts
-- out  scored    (rollout_id, policy, mean_entropy, mean_logprob), added to
INSERT INTO scored
SELECT rollout_id, policy, mean_entropy, mean_logprob
FROM read_parquet($scores)
QUALIFY row_number() OVER (
    PARTITION BY rollout_id
    ORDER BY
        policy <> (SELECT min(policy) FROM read_parquet($rollouts)),
        policy, mean_entropy, mean_logprob
) = 1;
