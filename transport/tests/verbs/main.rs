//! The verbs layer over this machine's RDMA device. Without one, every test prints that it is
//! skipped, and passes. Both ends are in this process, on one port.

#[macro_use]
mod ends;
mod bytes;
mod endings;
mod refusals;
mod sharing;
mod speed;
