//! SSDs over real processes: restarts, kills, and disks with faults.

mod disk_faults;
mod evacuation;
mod kills;
mod points;
mod restarts;
mod ssd_operator;
