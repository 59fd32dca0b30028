-- What the step replays: the chosen trajectories, whole, with the log-probabilities recorded when
-- they were collected (log pi_past).
--
-- in   chosen, trajectories
--      collected   (rollout_id, logprobs): exact ones from the collecting step's scores, if any
--      $step       t
-- out  the rows of the curated table
SELECT
    CAST($step AS INTEGER) AS step,
    c.problem_id,
    c.rollout_id,
    c.collected_step,
    t.prompt_ids,
    t.token_ids,
    coalesce(s.logprobs, t.logprobs) AS logprobs,
    CASE WHEN s.rollout_id IS NULL THEN 'engine' ELSE 'score' END AS logprob_source,
    c.reward,
    c.mean_entropy,
    c.entropy_source,
    c.entropy_policy,
    c.bucket,
    c.successes,
    c.attempts,
    c.rank,
    c.candidates
FROM chosen AS c
JOIN trajectories AS t ON t.rollout_id = c.rollout_id
LEFT JOIN collected AS s ON s.rollout_id = c.rollout_id
ORDER BY c.problem_id, c.rank;
