-- The fresh questions of a step: a shuffle for each epoch over the questions that are not retired,
-- each once an epoch; when an epoch's questions run out, those of the next one follow.
--
-- in   problems (problem_id), questions
--      replayed          (problem_id): what the step replays; no question is in a step twice
--      $seed             of the shuffles
--      $step             the step that is being planned
--      $limit            how many are wanted
--      $revive_after     retired questions come back after so many steps; null: never
-- out  problem_id, epoch, in the order of the shuffle
WITH epochs AS (
    SELECT coalesce(max(epoch), 0) AS current FROM questions
),
due AS (
    SELECT
        p.problem_id,
        -- Due in the epoch after that of its last turn, also where that epoch ended while it was
        -- replayed; one that was away, retired, goes on with the others. As in take_in.sql.
        CASE
            WHEN q.epoch IS NULL THEN epochs.current
            WHEN q.retired_step IS NOT NULL THEN greatest(q.epoch + 1, epochs.current)
            ELSE q.epoch + 1
        END AS epoch
    FROM problems AS p
    LEFT JOIN questions AS q ON q.problem_id = p.problem_id
    ANTI JOIN replayed AS r ON r.problem_id = p.problem_id
    CROSS JOIN epochs
    WHERE q.retired_step IS NULL OR $step >= q.retired_step + $revive_after
)
SELECT problem_id, epoch
FROM due
ORDER BY epoch, md5(concat_ws(':', 'fresh', $seed, epoch, problem_id)), problem_id
LIMIT $limit;
