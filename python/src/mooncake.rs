//! The boundary of Mooncake compatibility in this crate: the base of the wheel `kvpool-mooncake`.
//!
//! ```text
//!  mooncake.store, mooncake.engine        python/kvpool-mooncake       names, defaults, shapes
//!        │               │
//!  store::ObjectStore  engine::PeerEngine           this module        codes, lent memory, sessions
//!        │               │
//!  kvpool-client       kvpool_transport::peer
//! ```
//!
//! Nothing outside this module knows Mooncake's names or codes. `python/kvpool-mooncake/README.md` describes the
//! wheel.

pub(crate) mod engine;
pub(crate) mod store;
