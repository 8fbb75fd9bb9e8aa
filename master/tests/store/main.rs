//! The metadata stores: files of the master's own, and etcd.

#[path = "../etcd/mod.rs"]
mod etcd;
#[path = "../support/mod.rs"]
mod support;

mod embedded;
mod etcd_election;
mod etcd_log;
mod etcd_members;
mod etcd_slow;
mod etcd_speed;
mod kill;
mod recovery;
mod segment_ids;
mod standby_records;
