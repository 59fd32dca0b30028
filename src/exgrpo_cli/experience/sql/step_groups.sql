-- The groups of one step: the rows of one question in one role, and what becomes of them.
--
-- in   step_rows, questions, experience and problems (as they stood before the step)
--      planned           (problem_id, role): the step's plan; empty where none is kept
--      uses              (problem_id, rollout_id, step): what the step replayed, where failures are
--                        stored too
--      $step             t
--      $samples, $batch  K and B
--      $replayed         how many trajectories of a question enter its group
--      $count_replayed   whether k and n include them
--      $storing          whether this step stores at all: replay is on, or store_before_start
--      $retiring         whether questions retire at all: not where nothing is ever replayed
--      $revive_after     retired questions come back after so many steps; null: never
--      <retire>          the rule
-- out  step_groups       problem_id, role,
--                        successes, attempts               replayed rows counted,
--                        fresh_successes, fresh_attempts   without them,
--                        retired    whether the question was retired before (it then leaves nothing),
--                        solved     whether the rule retires the question by a group of this step,
--                        stores     whether the group's rollouts may enter the pool,
--                        moves      whether its counts become the question's: it has a success
--                        and the columns that rules see of a group and of its question
CREATE OR REPLACE TEMP TABLE step_groups AS
WITH past AS ( -- what was replayed: which ones matters where failures are stored too
    SELECT
        e.problem_id,
        least($replayed, count(*)) AS replayed,
        CASE
            WHEN bool_and(e.correct) THEN least($replayed, count(*))
            ELSE least($replayed, count(*) FILTER (WHERE e.correct AND u.rollout_id IS NOT NULL))
        END AS success
    FROM experience AS e
    LEFT JOIN (SELECT rollout_id FROM uses WHERE step = $step) AS u ON u.rollout_id = e.rollout_id
    WHERE e.problem_id IN (SELECT problem_id FROM step_rows WHERE role = 'replay')
    GROUP BY e.problem_id
),
sampled AS (
    SELECT
        problem_id,
        role,
        CAST(count(*) FILTER (WHERE correct) AS INTEGER) AS fresh_successes,
        CAST(count(*) AS INTEGER) AS fresh_attempts,
        sum(CAST(reward AS DOUBLE)) AS total,
        sum(CAST(reward AS DOUBLE) * reward) AS squares
    FROM step_rows
    GROUP BY problem_id, role
    UNION ALL
    -- Planned but not sampled (its prompt is too long): it had its turn in this epoch all the same.
    SELECT problem_id, role, 0, 0, 0, 0
    FROM planned
    WHERE role = 'fresh' AND problem_id NOT IN (SELECT problem_id FROM step_rows)
),
counted AS (
    SELECT
        s.problem_id,
        role,
        -- Replayed rows are not among the rollouts; a question whose trajectories have left the
        -- pool since it was planned has none.
        CAST(fresh_successes + coalesce(p.success, 0) AS INTEGER) AS successes,
        CAST(fresh_attempts + coalesce(p.replayed, 0) AS INTEGER) AS attempts,
        fresh_successes,
        fresh_attempts,
        CASE WHEN $count_replayed THEN successes ELSE fresh_successes END AS k,
        CASE WHEN $count_replayed THEN attempts ELSE fresh_attempts END AS n,
        fresh_successes AS fresh_k,
        fresh_attempts AS fresh_n,
        successes - fresh_successes AS past_reward,
        (total + past_reward) / attempts AS mean_reward,
        CASE WHEN attempts < 2 THEN 0.0 ELSE
            sqrt(greatest(0, squares + past_reward - attempts * mean_reward ** 2) / (attempts - 1))
        END AS std_reward
    FROM sampled AS s
    LEFT JOIN past AS p ON p.problem_id = s.problem_id AND s.role = 'replay'
),
held AS (
    SELECT problem_id, CAST(count(*) AS INTEGER) AS stored
    FROM experience
    WHERE problem_id IN (SELECT problem_id FROM counted)
    GROUP BY problem_id
),
seen AS (
    SELECT
        c.*,
        q.retired_step,
        coalesce(q.times_replayed, 0) AS times_replayed,
        $step - q.last_step AS since_sampled,
        coalesce(h.stored, 0) AS stored,
        p.source,
        p.metadata,
        <of_step|'retire', c.problem_id>
    FROM counted AS c
    LEFT JOIN questions AS q ON q.problem_id = c.problem_id
    LEFT JOIN held AS h ON h.problem_id = c.problem_id
    LEFT JOIN problems AS p ON p.problem_id = c.problem_id
),
ruled AS (
    SELECT *, CASE WHEN $retiring AND fresh_n > 0 THEN <retire|problem_id> ELSE false END AS mastered
    FROM seen
)
SELECT
    * EXCLUDE (mastered, retired_step, luck, past_reward),
    bool_or(mastered) OVER (PARTITION BY problem_id) AS solved,
    retired_step IS NOT NULL
        AND ($revive_after IS NULL OR $step < retired_step + $revive_after) AS retired,
    $storing AND NOT retired AND NOT solved AS stores,
    stores AND k > 0 AS moves
FROM ruled;
