//! What `kvctl bench` measures: the pool, and as yardsticks plain code that moves bytes as fast as
//! the machine does.

pub(crate) mod memcpy;
pub(crate) mod pool;
pub(crate) mod tcp;
