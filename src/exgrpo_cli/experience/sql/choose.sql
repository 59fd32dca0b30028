-- For each question that the plan replays: the stored trajectories to replay.
--
-- in   experience        as it stood before the step, and questions and problems too
--      planned           (problem_id, role): the step's plan
--      unsampled         (problem_id): replay questions that the rollout stage left out
--      scored            (rollout_id, policy, mean_entropy, mean_logprob): candidates under the
--                        current policy; empty where no scores were made
--      uses              (problem_id, rollout_id, step): what was replayed before
--      $step, $samples, $batch   t, K and B
--      $replayed         how many of a question
--      $count_replayed   which pair of counts makes the bucket
--      $by_policy        whether the rule names what scores say
--      $in_pool          whether the rule names the rank in the whole pool
--      <choose>          the rule
-- out  chosen            one row a trajectory: what it was chosen by, its question's bucket
CREATE OR REPLACE TEMP TABLE chosen AS
WITH used AS (
    SELECT rollout_id, CAST(count(*) AS INTEGER) AS times
    FROM uses
    WHERE step < $step
    GROUP BY rollout_id
),
pool AS (
    SELECT rollout_id, row_number() OVER (ORDER BY step DESC, sample, rollout_id DESC) AS newness
    FROM experience
    WHERE $in_pool
),
seen AS (
    SELECT
        e.problem_id,
        e.rollout_id,
        e.step AS collected_step,
        e.sample,
        e.part,
        CASE WHEN e.entropy_source = 'score' THEN e.entropy_policy END AS collected_policy,
        CASE WHEN s.rollout_id IS NULL THEN e.entropy_source ELSE 'score' END AS entropy_source,
        coalesce(s.policy, e.entropy_policy) AS entropy_policy,
        s.rollout_id IS NULL AS stale,
        q.bucket AS difficulty,
        CASE WHEN $count_replayed THEN q.successes ELSE q.fresh_successes END AS successes,
        CASE WHEN $count_replayed THEN q.attempts ELSE q.fresh_attempts END AS attempts,
        count(*) FILTER (WHERE stale) OVER (PARTITION BY e.problem_id) AS unscored,
        -- The columns that the rule sees.
        $step - e.step AS age,
        row_number() OVER (
            PARTITION BY e.problem_id
            ORDER BY e.step DESC, e.sample, e.rollout_id DESC
        ) AS newness,
        pool.newness AS pool_newness,
        coalesce(u.times, 0) AS times_used,
        e.reward,
        e.tokens,
        <origin|e.rollout_id> AS origin,
        -- Under the current policy where that is known, else as it was when it was collected.
        coalesce(s.mean_entropy, e.mean_entropy) AS mean_entropy,
        coalesce(s.mean_logprob, e.mean_logprob) AS mean_logprob,
        e.mean_entropy AS collected_entropy,
        e.mean_logprob AS collected_logprob,
        <k|q> AS k,
        <success_rate|q> AS success_rate,
        coalesce(q.times_replayed, 0) AS times_replayed,
        $step - q.last_step AS since_sampled,
        CAST(count(*) OVER (PARTITION BY e.problem_id) AS INTEGER) AS stored,
        problems.source,
        problems.metadata,
        <of_step|'choose', e.rollout_id>
    FROM experience AS e
    SEMI JOIN (SELECT problem_id FROM planned WHERE role = 'replay') AS p
        ON p.problem_id = e.problem_id
    ANTI JOIN unsampled AS n ON n.problem_id = e.problem_id
    LEFT JOIN scored AS s ON s.rollout_id = e.rollout_id
    LEFT JOIN questions AS q ON q.problem_id = e.problem_id
    LEFT JOIN used AS u ON u.rollout_id = e.rollout_id
    LEFT JOIN pool ON pool.rollout_id = e.rollout_id
    LEFT JOIN problems ON problems.problem_id = e.problem_id
),
valued AS (
    SELECT *, <choose|rollout_id> AS value FROM seen
),
ranked AS (
    SELECT
        *,
        row_number() OVER (
            PARTITION BY problem_id
            ORDER BY
                -- An entropy of another policy says nothing beside one of the step's own.
                CASE WHEN $by_policy THEN stale END,
                value, collected_step, sample, rollout_id
        ) AS rank
    FROM valued
)
SELECT
    problem_id,
    rollout_id,
    collected_step,
    part,
    reward,
    collected_policy, -- whose exact log-probabilities were recorded; null where none were
    mean_entropy,
    entropy_source,
    entropy_policy,
    stale,
    difficulty AS bucket,
    successes,
    attempts,
    CAST(rank AS INTEGER) AS rank,
    stored AS candidates,
    CAST(unscored AS INTEGER) AS unscored -- of the candidates: not under the current policy
FROM ranked
WHERE rank <= $replayed
ORDER BY problem_id, rank;
