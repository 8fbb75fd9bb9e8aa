//! The verbs layer over whatever RDMA device this machine has; without one, every test says so and
//! passes. Both ends are in this process, on one port.

#[macro_use]
mod ends;
mod bytes;
mod endings;
mod refusals;
mod sharing;
mod speed;
