-- The fresh questions of a step: a shuffle for each epoch over the questions that are not retired,
-- each once an epoch; when an epoch's questions run out, those of the next one follow. Inside an
-- epoch the weights decide who comes first, as in plan_replay.sql.
--
-- in   problems, questions, experience
--      replayed          (problem_id): what the step replays; no question is in a step twice
--      $seed             of the shuffles
--      $step             the step that is being planned
--      $samples, $batch  K and B
--      $count_replayed   which pair of counts makes the bucket
--      $limit            how many are wanted
--      $revive_after     retired questions come back after so many steps; null: never
--      <fresh>           the rule
-- out  problem_id, epoch, in the order of the shuffle
WITH epochs AS (
    SELECT coalesce(max(epoch), 0) AS current FROM questions
),
held AS (
    SELECT problem_id, CAST(count(*) AS INTEGER) AS stored FROM experience GROUP BY problem_id
),
seen AS (
    SELECT
        p.problem_id,
        -- Due in the epoch after that of its last turn, also where that epoch ended while it was
        -- replayed; one that was away, retired, goes on with the others. As in take_in.sql.
        CASE
            WHEN q.epoch IS NULL THEN epochs.current
            WHEN q.retired_step IS NOT NULL THEN greatest(q.epoch + 1, epochs.current)
            ELSE q.epoch + 1
        END AS epoch,
        -- The columns that the rule sees.
        <k|q> AS k,
        <success_rate|q> AS success_rate,
        coalesce(q.times_replayed, 0) AS times_replayed,
        $step - q.last_step AS since_sampled,
        coalesce(h.stored, 0) AS stored,
        p.source,
        p.metadata,
        <of_step|'fresh', p.problem_id>
    FROM problems AS p
    LEFT JOIN questions AS q ON q.problem_id = p.problem_id
    LEFT JOIN held AS h ON h.problem_id = p.problem_id
    ANTI JOIN replayed AS r ON r.problem_id = p.problem_id
    CROSS JOIN epochs
    WHERE q.retired_step IS NULL OR $step >= q.retired_step + $revive_after
),
due AS (
    SELECT
        problem_id,
        epoch,
        <fresh|problem_id> AS weight,
        md5(concat_ws(':', 'fresh', $seed, epoch, problem_id)) AS ticket
    FROM seen
)
SELECT problem_id, epoch
FROM due
WHERE weight > 0
ORDER BY epoch, -ln(1 - <share|ticket>) / weight, ticket, problem_id
LIMIT $limit;
