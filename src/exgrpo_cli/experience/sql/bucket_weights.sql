-- The weight with which each bucket is drawn; how many questions it holds does not matter.
--
-- in   pool_questions              (problem_id, count)
--      $weights                    normal, linear, sqrt, linear_clip or uniform
--      $sigma                      of the normal density, in counts k
--      $samples                    K
-- out  count, questions, log_weight (up to a constant; -infinity for weight 0), by count
SELECT
    count,
    questions,
    CASE
        WHEN $weights = 'uniform' THEN 0.0
        WHEN $weights = 'normal' THEN -0.5 * pow((count - $samples / 2.0) / $sigma, 2)
        WHEN share <= 0 THEN CAST('-infinity' AS DOUBLE)
        WHEN $weights = 'linear' THEN ln(share)
        WHEN $weights = 'sqrt' THEN 0.5 * ln(share)
        WHEN $weights = 'linear_clip' THEN ln(least(share, 0.5))
    END AS log_weight
FROM (
    SELECT
        count,
        CAST(count(*) AS INTEGER) AS questions,
        CAST(count AS DOUBLE) / $samples AS share
    FROM pool_questions
    GROUP BY count
)
ORDER BY count;
