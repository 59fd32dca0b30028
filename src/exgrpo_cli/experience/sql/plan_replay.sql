-- The replay questions of a step: from each bucket as many as were drawn for it, by weight and
-- without replacement (the smallest of exponential variables: Efraimidis and Spirakis, 2006).
--
-- in   pool_questions   (problem_id, count, weight)
--      draws            (count, questions): how many of each bucket
--      $seed, $step     of the order inside a bucket
-- out  problem_id, in the order of the plan
SELECT problem_id
FROM (
    SELECT
        problem_id,
        count,
        md5(concat_ws(':', 'replay', $seed, $step, problem_id)) AS ticket,
        row_number() OVER (
            PARTITION BY count
            ORDER BY -ln(1 - <share|ticket>) / weight, ticket, problem_id
        ) AS place
    FROM pool_questions
)
JOIN draws USING (count)
WHERE place <= draws.questions
ORDER BY ticket, problem_id;
