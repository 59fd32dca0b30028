-- Mean entropies and log-probabilities under one policy, without the per-token lists.
--
-- in   $scores   scores files of one step
--      $policy   the step's policy; should a trajectory be scored under several, this one counts
-- out  scored    (rollout_id, policy, mean_entropy, mean_logprob), added to
INSERT INTO scored
SELECT rollout_id, policy, mean_entropy, mean_logprob
FROM read_parquet($scores)
QUALIFY row_number() OVER (
    PARTITION BY rollout_id
    ORDER BY policy <> $policy, policy, mean_entropy, mean_logprob
) = 1;
