-- The weight with which each bucket is drawn.
--
-- in   pool_questions              (problem_id, count, weight)
--      $step, $samples, $batch     the step that is being planned, K and B
--      <log_bucket_weight>         the rule's logarithm: of exp(x) it is x, so that nothing underflows
-- out  count, questions, log_weight (up to a constant; -infinity for weight 0), by count
SELECT
    bucket AS count,
    questions,
    <log_bucket_weight|concat('bucket ', bucket)> AS log_weight
FROM (
    SELECT
        count AS bucket,
        CAST(count(*) AS INTEGER) AS questions,
        CAST($samples AS INTEGER) AS samples,
        CAST($batch AS INTEGER) AS batch,
        CAST($step AS INTEGER) AS step
    FROM pool_questions
    GROUP BY count
)
ORDER BY count;
