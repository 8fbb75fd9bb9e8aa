//! The ports of a master: framed connections for hot calls, gRPC for all calls of clients and
//! nodes, HTTP for probes, metrics and the page.

mod calls;
pub mod framed;
mod grpc;
mod http;
mod nodes;
mod page;
mod passing;
mod refused;
mod request;
pub mod rights;
mod status;

pub use grpc::PoolService;
pub use http::router;
pub use nodes::{NodeInbox, NodesService};
