-- The limits of the pool: the oldest trajectories go first, and of one step's those with the highest
-- sample numbers, so that a question loses its surplus before its only success. What is gone counts as
-- unknown: should the policy sample the same tokens again, they enter anew, with their log-probabilities
-- of then.
--
-- in   experience         as it stands after the step took in what it sampled
--      step_groups        the step's groups: only their questions can have too many now
--      $step              t
--      $max_age           the highest age, in steps, at which a trajectory may be replayed; null: any
--      $max_per_question  trajectories a question may keep; null: any number
--      $max_trajectories  trajectories the pool may hold; null: any number
-- out  experience         without what is beyond the limits

-- By age: what would be too old in the next step.
DELETE FROM experience WHERE $step + 1 - step > $max_age;

-- By count per question.
DELETE FROM experience
WHERE rollout_id IN (
    SELECT rollout_id
    FROM experience
    WHERE $max_per_question IS NOT NULL
        AND problem_id IN (SELECT problem_id FROM step_groups)
    QUALIFY row_number() OVER (
        PARTITION BY problem_id
        ORDER BY step DESC, sample, rollout_id DESC
    ) > $max_per_question
);

-- In all: whole steps from the oldest on, and of the last of these steps as many as needed.
DELETE FROM experience
WHERE rollout_id IN (
    WITH steps AS (
        SELECT
            step,
            sum(count(*)) OVER (ORDER BY step) - count(*) AS older,
            sum(count(*)) OVER () - $max_trajectories AS excess
        FROM experience
        GROUP BY step
    )
    SELECT p.rollout_id
    FROM experience AS p
    JOIN steps AS s ON s.step = p.step AND s.older < s.excess
    QUALIFY s.older + row_number() OVER (
        PARTITION BY p.step
        ORDER BY p.sample DESC, p.rollout_id
    ) <= s.excess
);
