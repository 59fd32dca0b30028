-- What leaves the pool by the rule. What is gone counts as unknown: should the policy sample the same
-- tokens again, they enter anew, with their log-probabilities of then.
--
-- in   experience, questions, problems   as they stand after the step took in what it sampled
--      uses             (problem_id, rollout_id, step): what was replayed up to this step
--      $step            t
--      $samples, $batch K and B
--      <drop>           the rule
-- out  experience       without the trajectories that leave
DELETE FROM experience
WHERE rollout_id IN (
    WITH used AS (
        SELECT rollout_id, CAST(count(*) AS INTEGER) AS times
        FROM uses
        WHERE step <= $step
        GROUP BY rollout_id
    ),
    seen AS (
        SELECT
            e.rollout_id,
            e.problem_id,
            $step + 1 - e.step AS age,
            -- Of one step's the highest sample numbers are the oldest, so that a question loses its
            -- surplus before its only success.
            row_number() OVER (
                PARTITION BY e.problem_id
                ORDER BY e.step DESC, e.sample, e.rollout_id DESC
            ) AS newness,
            row_number() OVER (ORDER BY e.step DESC, e.sample, e.rollout_id DESC) AS pool_newness,
            coalesce(u.times, 0) AS times_used,
            e.reward,
            e.tokens,
            <origin|e.rollout_id> AS origin,
            e.mean_entropy,
            e.mean_logprob,
            e.mean_entropy AS collected_entropy,
            e.mean_logprob AS collected_logprob,
            <k|q> AS k,
            <success_rate|q> AS success_rate,
            coalesce(q.times_replayed, 0) AS times_replayed,
            $step + 1 - q.last_step AS since_sampled,
            CAST(count(*) OVER (PARTITION BY e.problem_id) AS INTEGER) AS stored,
            p.source,
            p.metadata,
            <of_step|'drop', e.rollout_id>
        FROM experience AS e
        LEFT JOIN used AS u ON u.rollout_id = e.rollout_id
        LEFT JOIN questions AS q ON q.problem_id = e.problem_id
        LEFT JOIN problems AS p ON p.problem_id = e.problem_id
    )
    SELECT rollout_id FROM seen WHERE <drop|rollout_id>
);
