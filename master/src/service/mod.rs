//! How the pool is asked: gRPC for clients and nodes, HTTP for probes and people.

mod batch;
mod http;
mod nodes;
mod pool;
mod status;

pub use http::router;
pub use nodes::NodesService;
pub use pool::PoolService;
