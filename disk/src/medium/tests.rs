//! Tests of the medium. `power` cuts the power, and `corruption` damages extents on the disk.

mod codec;
mod corruption;
mod device;
mod faults;
mod identity;
mod power;
mod rig;
mod scanning;
