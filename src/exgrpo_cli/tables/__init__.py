"""The tables between the stages: schemas, checked reading, atomic writing, parts and shards.

Every file is Parquet with zstd. A file is written under a temporary name in its own folder,
fsynced and renamed, so a file that exists is complete. A stage's work for one step is cut into
numbered *parts*, ``part-00003-of-00016.parquet``; how many there are follows from the plan and the
recipe alone. A shard ``I/N`` does the parts whose number is I modulo N, so any number of array
tasks, in any order, produces the same files.
"""

from exgrpo_cli.tables.files import FULL as FULL
from exgrpo_cli.tables.files import atomic_folder as atomic_folder
from exgrpo_cli.tables.files import atomic_path as atomic_path
from exgrpo_cli.tables.files import finite_or_none as finite_or_none
from exgrpo_cli.tables.files import fsync as fsync
from exgrpo_cli.tables.files import link_file as link_file
from exgrpo_cli.tables.files import read_json as read_json
from exgrpo_cli.tables.files import remove_abandoned as remove_abandoned
from exgrpo_cli.tables.files import remove_folder as remove_folder
from exgrpo_cli.tables.files import umask as umask
from exgrpo_cli.tables.files import write_json as write_json
from exgrpo_cli.tables.files import write_text as write_text
from exgrpo_cli.tables.parts import WHOLE as WHOLE
from exgrpo_cli.tables.parts import Shard as Shard
from exgrpo_cli.tables.parts import chunked as chunked
from exgrpo_cli.tables.parts import divisions as divisions
from exgrpo_cli.tables.parts import parquet_files as parquet_files
from exgrpo_cli.tables.parts import parse_shard as parse_shard
from exgrpo_cli.tables.parts import part_name as part_name
from exgrpo_cli.tables.parts import part_number as part_number
from exgrpo_cli.tables.parts import require_all_parts as require_all_parts
from exgrpo_cli.tables.parts import require_one_division as require_one_division
from exgrpo_cli.tables.schemas import EQUAL_LENGTHS as EQUAL_LENGTHS
from exgrpo_cli.tables.schemas import KEYS as KEYS
from exgrpo_cli.tables.schemas import SCHEMAS as SCHEMAS
from exgrpo_cli.tables.schemas import WORDS as WORDS
from exgrpo_cli.tables.schemas import frame as frame
from exgrpo_cli.tables.schemas import polars_schema as polars_schema
from exgrpo_cli.tables.schemas import row_seed as row_seed
from exgrpo_cli.tables.schemas import token_hash as token_hash
from exgrpo_cli.tables.table import check_columns as check_columns
from exgrpo_cli.tables.table import read_table as read_table
from exgrpo_cli.tables.table import write_frames as write_frames
from exgrpo_cli.tables.table import write_table as write_table
