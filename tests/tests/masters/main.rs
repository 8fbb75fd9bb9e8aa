//! Masters over real processes: kills, fail-overs, cuts and full disks.

mod clocks;
mod cut_off;
mod durability;
mod epochs;
mod etcd_outage;
mod fail_over;
mod outage;
mod standbys;
mod store_disk;
