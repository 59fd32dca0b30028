"""The tables between the stages: schemas, checked reading, atomic writing, parts and shards.

Every file is Parquet with zstd. A file is written under a temporary name in its own folder,
fsynced and renamed, so a file that exists is complete. A stage's work for one step is cut into
numbered *parts*, ``part-00003-of-00016.parquet``; how many there are follows from the plan and the
recipe alone. A shard ``I/N`` does the parts whose number is I modulo N, so any number of array
tasks, in any order, produces the same files.
"""

from exgrpo_cli.tables.duck import literal_path
from exgrpo_cli.tables.files import (
    FULL,
    atomic_folder,
    atomic_path,
    finite_or_none,
    fsync,
    link_file,
    read_json,
    remove_abandoned,
    remove_folder,
    umask,
    write_json,
    write_text,
)
from exgrpo_cli.tables.parts import (
    WHOLE,
    Shard,
    chunked,
    divisions,
    parquet_files,
    parse_shard,
    part_name,
    part_number,
    require_all_parts,
    require_one_division,
)
from exgrpo_cli.tables.schemas import (
    EQUAL_LENGTHS,
    KEYS,
    SCHEMAS,
    WORDS,
    frame,
    polars_schema,
    row_seed,
    token_hash,
)
from exgrpo_cli.tables.table import check_columns, read_table, write_frames, write_table

__all__ = [
    "EQUAL_LENGTHS",
    "FULL",
    "KEYS",
    "SCHEMAS",
    "WHOLE",
    "WORDS",
    "Shard",
    "atomic_folder",
    "atomic_path",
    "check_columns",
    "chunked",
    "divisions",
    "finite_or_none",
    "frame",
    "fsync",
    "link_file",
    "literal_path",
    "parquet_files",
    "parse_shard",
    "part_name",
    "part_number",
    "polars_schema",
    "read_json",
    "read_table",
    "remove_abandoned",
    "remove_folder",
    "require_all_parts",
    "require_one_division",
    "row_seed",
    "token_hash",
    "umask",
    "write_frames",
    "write_json",
    "write_table",
    "write_text",
]
