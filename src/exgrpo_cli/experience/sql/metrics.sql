-- A step in numbers.
--
-- in   step_rows, step_groups, chosen; experience and questions as they stand after the step
--      $step             t
--      $revive_after     retired questions come back after so many steps; null: never
-- out  one row, its columns named as in metrics.jsonl; null where there is nothing to average
WITH sampled AS (
    SELECT
        avg(reward) AS reward,
        avg(reward) FILTER (WHERE role = 'fresh') AS fresh_reward,
        avg(reward) FILTER (WHERE role = 'replay') AS replay_reward,
        avg(tokens) AS tokens,
        avg(CAST(finish_reason = 'length' AS INTEGER)) AS truncated,
        avg(CAST(status = 'no_answer' AS INTEGER)) AS no_answer,
        avg(CAST(status = 'no_format' AS INTEGER)) AS no_format
    FROM step_rows
),
solve AS (
    SELECT
        sum(successes) / sum(attempts) AS rate, -- the replayed rows counted
        sum(fresh_successes) / sum(fresh_attempts) AS fresh_rate,
        avg(CAST(fresh_successes = 0 AS INTEGER)) AS none,
        avg(CAST(fresh_successes = fresh_attempts AS INTEGER)) AS all_of_it
    FROM step_groups
    WHERE fresh_attempts > 0
),
stored AS (
    SELECT
        count(*) AS trajectories,
        avg($step - step) AS age
    FROM experience
),
held AS (
    SELECT
        count(*) FILTER (WHERE bucket IS NOT NULL) AS questions,
        count(*) FILTER (WHERE bucket = 'easy') AS easy,
        count(*) FILTER (WHERE bucket = 'medium') AS medium,
        count(*) FILTER (WHERE bucket = 'hard') AS hard
    FROM questions
    SEMI JOIN experience USING (problem_id)
),
gone AS (
    SELECT count(*) AS retired
    FROM questions
    WHERE retired_step IS NOT NULL
        AND ($revive_after IS NULL OR $step + 1 < retired_step + $revive_after)
),
replayed AS (
    SELECT
        count(DISTINCT problem_id) AS questions,
        avg($step - collected_step) AS age,
        avg(mean_entropy) AS entropy,
        count(*) FILTER (WHERE stale) AS stale
    FROM chosen
)
SELECT
    sampled.reward AS "reward/mean",
    sampled.fresh_reward AS "reward/fresh_mean",
    sampled.replay_reward AS "reward/replay_mean",
    coalesce(solve.rate, 0) AS "success_rate",
    coalesce(solve.fresh_rate, 0) AS "success_rate_fresh",
    sampled.tokens AS "rollout/tokens_mean",
    sampled.truncated AS "rollout/truncated_share",
    sampled.no_answer AS "rollout/no_answer_share",
    sampled.no_format AS "rollout/no_format_share",
    solve.none AS "solve/none",
    solve.all_of_it AS "solve/all",
    held.questions AS "pool/questions",
    stored.trajectories AS "pool/trajectories",
    held.easy AS "pool/bucket_easy",
    held.medium AS "pool/bucket_medium",
    held.hard AS "pool/bucket_hard",
    gone.retired AS "pool/retired",
    stored.age AS "pool/age_mean",
    replayed.questions AS "replay/questions",
    replayed.age AS "replay/age_mean",
    replayed.entropy AS "replay/mean_entropy",
    replayed.stale AS "replay/stale_entropies"
FROM sampled, solve, stored, held, gone, replayed;
