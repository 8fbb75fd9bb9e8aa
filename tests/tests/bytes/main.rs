//! Blocks over real processes: right bytes or an error, whatever fails meanwhile.

mod bad_input;
mod eviction;
mod extent_reuse;
mod failures;
mod framed;
mod guarded_fuzz;
mod half_written;
mod history;
mod hot_blocks;
mod hugepages;
mod main_job;
mod mutations;
mod no_wrong_bytes;
mod node_wait;
mod replicas;
mod slow_peers;
mod writers;
