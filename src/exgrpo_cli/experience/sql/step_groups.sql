-- The groups of one step: the rows of one question in one role, and what becomes of them.
--
-- in   step_rows, questions and experience (as they stood before the step)
--      planned           (problem_id, role): the step's plan; empty where none is kept
--      $step             t
--      $lower, $upper    a group is stored when lower < k <= upper; upper null: however often
--      $count_replayed   whether k and n include the replayed row
--      $storing          whether this step stores at all: replay is on, or store_before_start
--      $retiring         whether questions retire at all: not where nothing is ever replayed
--      $revive_after     retired questions come back after so many steps; null: never
-- out  step_groups       problem_id, role,
--                        successes, attempts               the replayed row counted,
--                        fresh_successes, fresh_attempts   without it,
--                        retired    whether the question was retired before (it then leaves nothing),
--                        solved     whether a group of the question succeeded throughout in this step,
--                        stores     whether the group's successes enter the pool and move the bucket
CREATE OR REPLACE TEMP TABLE step_groups AS
WITH sampled AS (
    SELECT
        problem_id,
        role,
        CAST(count(*) FILTER (WHERE correct) AS INTEGER) AS fresh_successes,
        CAST(count(*) AS INTEGER) AS fresh_attempts,
        -- The replayed trajectory is sample 0 of its group and not among the rollouts; a question
        -- whose trajectories have left the pool since it was planned has none.
        CAST(
            role = 'replay' AND problem_id IN (SELECT problem_id FROM experience) AS INTEGER
        ) AS replayed
    FROM step_rows
    GROUP BY problem_id, role
    UNION ALL
    -- Planned but not sampled (its prompt is too long): it had its turn in this epoch all the same.
    SELECT problem_id, role, 0, 0, 0
    FROM planned
    WHERE role = 'fresh' AND problem_id NOT IN (SELECT problem_id FROM step_rows)
),
counted AS (
    SELECT
        problem_id,
        role,
        fresh_successes + replayed AS successes,
        fresh_attempts + replayed AS attempts,
        fresh_successes,
        fresh_attempts,
        CASE WHEN $count_replayed THEN fresh_successes + replayed ELSE fresh_successes END AS k,
        $retiring AND bool_or(fresh_attempts > 0 AND fresh_successes = fresh_attempts)
            OVER (PARTITION BY problem_id) AS solved
    FROM sampled
)
SELECT
    g.problem_id,
    g.role,
    g.successes,
    g.attempts,
    g.fresh_successes,
    g.fresh_attempts,
    g.solved,
    q.retired_step IS NOT NULL
        AND ($revive_after IS NULL OR $step < q.retired_step + $revive_after) AS retired,
    $storing AND NOT retired AND NOT g.solved AND g.k > $lower AND g.k <= coalesce($upper, g.k) AS stores
FROM counted AS g
LEFT JOIN questions AS q ON q.problem_id = g.problem_id;
