-- Views over a run directory, for DuckDB started in it:
--
--     cd runs/NAME && duckdb -init /path/to/views.sql
--
-- A table that has no file yet is an empty view. Columns are those of the tables as documented; in
-- plan, rollouts, verdicts, scores and curated, `file` says where a row comes from. Token lists are
-- read only by queries that name them. `make docs` writes this file from the schemas.

SET VARIABLE from_problems = (SELECT CASE WHEN count(*) > 0
    THEN 'SELECT * FROM read_parquet(''problems.parquet'')'
    ELSE 'SELECT NULL::VARCHAR AS problem_id,
        NULL::STRUCT(role VARCHAR, content VARCHAR)[] AS prompt, NULL::VARCHAR AS answer,
        NULL::VARCHAR AS verifier, NULL::VARCHAR AS source, NULL::VARCHAR AS metadata WHERE false'
    END FROM glob('problems.parquet'));
CREATE OR REPLACE VIEW problems AS FROM query(getvariable('from_problems'));

SET VARIABLE from_plan = (SELECT CASE WHEN count(*) > 0
    THEN 'SELECT * FROM read_parquet(''plan/step-*.parquet'', filename = ''file'')'
    ELSE 'SELECT NULL::INTEGER AS step, NULL::VARCHAR AS problem_id, NULL::VARCHAR AS role,
        NULL::INTEGER AS samples, NULL::INTEGER AS successes, NULL::INTEGER AS attempts,
        NULL::VARCHAR AS file WHERE false'
    END FROM glob('plan/step-*.parquet'));
CREATE OR REPLACE VIEW plan AS FROM query(getvariable('from_plan'));

SET VARIABLE from_rollouts = (SELECT CASE WHEN count(*) > 0
    THEN 'SELECT * FROM read_parquet(''rollouts/step-*/*.parquet'', filename = ''file'')'
    ELSE 'SELECT NULL::VARCHAR AS rollout_id, NULL::INTEGER AS step, NULL::VARCHAR AS problem_id,
        NULL::INTEGER AS sample, NULL::VARCHAR AS role, NULL::VARCHAR AS policy,
        NULL::INTEGER[] AS prompt_ids, NULL::INTEGER[] AS token_ids, NULL::VARCHAR AS text,
        NULL::FLOAT[] AS logprobs, NULL::FLOAT[] AS entropies, NULL::FLOAT AS mean_entropy,
        NULL::VARCHAR AS entropy_source, NULL::FLOAT AS mean_logprob,
        NULL::INTEGER AS tokens, NULL::VARCHAR AS token_hash,
        NULL::VARCHAR AS finish_reason, NULL::BIGINT AS seed, NULL::VARCHAR AS file WHERE false'
    END FROM glob('rollouts/step-*/*.parquet'));
CREATE OR REPLACE VIEW rollouts AS FROM query(getvariable('from_rollouts'));

SET VARIABLE from_verdicts = (SELECT CASE WHEN count(*) > 0
    THEN 'SELECT * FROM read_parquet(''verdicts/step-*/*.parquet'', filename = ''file'')'
    ELSE 'SELECT NULL::VARCHAR AS rollout_id, NULL::FLOAT AS reward, NULL::BOOLEAN AS correct,
        NULL::VARCHAR AS extracted, NULL::VARCHAR AS status, NULL::VARCHAR AS verifier,
        NULL::FLOAT AS seconds, NULL::VARCHAR AS file WHERE false'
    END FROM glob('verdicts/step-*/*.parquet'));
CREATE OR REPLACE VIEW verdicts AS FROM query(getvariable('from_verdicts'));

SET VARIABLE from_scores = (SELECT CASE WHEN count(*) > 0
    THEN 'SELECT * FROM read_parquet(''scores/step-*/*.parquet'', filename = ''file'')'
    ELSE 'SELECT NULL::VARCHAR AS rollout_id, NULL::VARCHAR AS policy, NULL::INTEGER AS step,
        NULL::FLOAT[] AS logprobs, NULL::FLOAT[] AS entropies, NULL::FLOAT AS mean_entropy,
        NULL::FLOAT AS mean_logprob, NULL::VARCHAR AS file WHERE false'
    END FROM glob('scores/step-*/*.parquet'));
CREATE OR REPLACE VIEW scores AS FROM query(getvariable('from_scores'));

SET VARIABLE from_experience = (SELECT CASE WHEN count(*) > 0
    THEN 'SELECT * FROM read_parquet(''experience.parquet'')'
    ELSE 'SELECT NULL::VARCHAR AS rollout_id, NULL::VARCHAR AS problem_id, NULL::INTEGER AS step,
        NULL::INTEGER AS sample, NULL::INTEGER AS tokens, NULL::VARCHAR AS token_hash,
        NULL::BOOLEAN AS correct, NULL::FLOAT AS reward, NULL::FLOAT AS mean_entropy,
        NULL::FLOAT AS mean_logprob, NULL::VARCHAR AS entropy_source,
        NULL::VARCHAR AS entropy_policy, NULL::VARCHAR AS part WHERE false'
    END FROM glob('experience.parquet'));
CREATE OR REPLACE VIEW experience AS FROM query(getvariable('from_experience'));

SET VARIABLE from_questions = (SELECT CASE WHEN count(*) > 0
    THEN 'SELECT * FROM read_parquet(''questions.parquet'')'
    ELSE 'SELECT NULL::VARCHAR AS problem_id, NULL::INTEGER AS successes, NULL::INTEGER AS attempts,
        NULL::INTEGER AS fresh_successes, NULL::INTEGER AS fresh_attempts,
        NULL::VARCHAR AS bucket, NULL::INTEGER AS last_step,
        NULL::INTEGER AS times_replayed, NULL::INTEGER AS retired_step,
        NULL::INTEGER AS epoch WHERE false'
    END FROM glob('questions.parquet'));
CREATE OR REPLACE VIEW questions AS FROM query(getvariable('from_questions'));

SET VARIABLE from_curated = (SELECT CASE WHEN count(*) > 0
    THEN 'SELECT * FROM read_parquet(''curated/step-*.parquet'', filename = ''file'')'
    ELSE 'SELECT NULL::INTEGER AS step, NULL::VARCHAR AS problem_id, NULL::VARCHAR AS rollout_id,
        NULL::INTEGER AS collected_step, NULL::INTEGER[] AS prompt_ids,
        NULL::INTEGER[] AS token_ids, NULL::FLOAT[] AS logprobs,
        NULL::VARCHAR AS logprob_source, NULL::FLOAT AS reward, NULL::FLOAT AS mean_entropy,
        NULL::VARCHAR AS entropy_source, NULL::VARCHAR AS entropy_policy,
        NULL::VARCHAR AS bucket, NULL::INTEGER AS successes, NULL::INTEGER AS attempts,
        NULL::INTEGER AS rank, NULL::INTEGER AS candidates, NULL::VARCHAR AS file WHERE false'
    END FROM glob('curated/step-*.parquet'));
CREATE OR REPLACE VIEW curated AS FROM query(getvariable('from_curated'));
