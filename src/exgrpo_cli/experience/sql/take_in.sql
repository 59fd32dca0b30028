-- Take one step's groups into the experience: counts, buckets, retirement, the pool.
--
-- in   step_rows, step_groups
--      $step             t
--      $count_replayed   which pair of counts makes the bucket
--      <store>           the rule
-- out  questions         the step's questions renewed
--      experience        the trajectories of questions retired now are gone; new successes are in

-- The questions of this step, as they stand after it.
CREATE OR REPLACE TEMP TABLE touched AS
WITH epochs AS (
    SELECT coalesce(max(epoch), 0) AS current FROM questions
),
step_questions AS (
    SELECT
        problem_id,
        bool_or(role = 'fresh') AS fresh,
        bool_or(role = 'replay') AS replayed,
        max(fresh_attempts) > 0 AS sampled,
        bool_or(retired) AS retired,
        bool_or(solved) AS solved,
        bool_or(moves) AS moves,
        -- Where a question has two groups in a step, the fresh one comes last: its bucket stays.
        arg_min(successes, role) FILTER (WHERE moves) AS successes,
        arg_min(attempts, role) FILTER (WHERE moves) AS attempts,
        arg_min(fresh_successes, role) FILTER (WHERE moves) AS fresh_successes,
        arg_min(fresh_attempts, role) FILTER (WHERE moves) AS fresh_attempts
    FROM step_groups
    GROUP BY problem_id
),
counts AS (
    SELECT
        s.problem_id,
        s.fresh,
        s.replayed,
        CASE
            WHEN s.retired OR NOT s.sampled THEN q.retired_step
            WHEN s.solved THEN $step
            -- else null: also where a question that came back failed its check-up
        END AS retired_step,
        -- A question that is retired now has no bucket; one without a success keeps its bucket.
        CASE WHEN s.solved THEN NULL WHEN s.moves THEN s.successes ELSE q.successes
        END AS successes,
        CASE WHEN s.solved THEN NULL WHEN s.moves THEN s.attempts ELSE q.attempts
        END AS attempts,
        CASE WHEN s.solved THEN NULL WHEN s.moves THEN s.fresh_successes ELSE q.fresh_successes
        END AS fresh_successes,
        CASE WHEN s.solved THEN NULL WHEN s.moves THEN s.fresh_attempts ELSE q.fresh_attempts
        END AS fresh_attempts,
        coalesce(q.times_replayed, 0) AS times_replayed,
        q.epoch,
        q.retired_step IS NOT NULL AS was_retired
    FROM step_questions AS s
    LEFT JOIN questions AS q ON q.problem_id = s.problem_id
)
SELECT
    problem_id,
    successes,
    attempts,
    fresh_successes,
    fresh_attempts,
    CASE
        WHEN k IS NULL THEN NULL
        WHEN 4 * k >= 3 * n THEN 'easy'
        WHEN 4 * k > n THEN 'medium'
        ELSE 'hard'
    END AS bucket,
    $step AS last_step,
    times_replayed + CAST(replayed AS INTEGER) AS times_replayed,
    retired_step,
    -- Each question is drawn fresh once an epoch. As in plan_fresh.sql.
    CASE
        WHEN NOT fresh THEN epoch
        WHEN epoch IS NULL THEN epochs.current
        WHEN was_retired THEN greatest(epoch + 1, epochs.current)
        ELSE epoch + 1
    END AS epoch
FROM (
    SELECT
        *,
        CASE WHEN $count_replayed THEN successes ELSE fresh_successes END AS k,
        CASE WHEN $count_replayed THEN attempts ELSE fresh_attempts END AS n
    FROM counts
)
CROSS JOIN epochs;

DELETE FROM questions WHERE problem_id IN (SELECT problem_id FROM touched);

INSERT INTO questions BY NAME SELECT * FROM touched;

-- Mastered: the trajectories leave at once.
DELETE FROM experience WHERE problem_id IN (SELECT problem_id FROM step_groups WHERE solved);

-- The same token ids of a question enter once, and the first ones stay.
INSERT INTO experience BY NAME
WITH known AS (
    SELECT problem_id, token_hash
    FROM experience
    WHERE problem_id IN (SELECT problem_id FROM step_groups)
),
seen AS ( -- with the columns that the rule sees
    SELECT
        r.*,
        g.* EXCLUDE (problem_id, role, step),
        r.reward - g.mean_reward AS advantage,
        <origin|r.rollout_id> AS origin,
        <luck|'store', r.rollout_id> AS luck
    FROM step_rows AS r
    JOIN step_groups AS g ON g.problem_id = r.problem_id AND g.role = r.role
    WHERE g.stores
)
SELECT
    r.rollout_id, r.problem_id, r.step, r.sample, r.tokens, r.token_hash, r.correct, r.reward,
    r.mean_entropy, r.mean_logprob, r.entropy_source, r.entropy_policy, r.part
FROM seen AS r
ANTI JOIN known ON known.problem_id = r.problem_id AND known.token_hash = r.token_hash
WHERE <store|rollout_id>
QUALIFY row_number() OVER (
    PARTITION BY r.problem_id, r.token_hash
    ORDER BY r.role DESC, r.sample, r.rollout_id -- the replay group comes first
) = 1
-- The table keeps this order, so the pool lies in order of entry and is never sorted as a whole.
ORDER BY r.problem_id, r.sample, r.rollout_id;
