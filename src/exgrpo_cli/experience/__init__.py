"""Experience management: which successes are kept, and what each step learns from.

The history of a run (its rollouts, verdicts and scores) is the truth. From it follow two tables,
``experience`` (an index of the stored successes: the pool) and ``questions`` (each question's
bucket, retirement and epoch), and from these what a step replays and what the next one samples.
The rules are queries in ``sql/``, a file each. :class:`exgrpo_cli.experience.pool.Experience`
holds the tables and runs the queries; around it lie ``history`` (what it reads), ``choose`` (what
is replayed), ``plan`` with ``buckets`` (what is sampled next), ``curation`` (what the tables on
disk were derived from) and ``whatif`` (other settings over the same history).

The method is ExGRPO's (arXiv 2510.02245), section "Experience Management".
"""
