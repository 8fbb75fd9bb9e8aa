//! kvstore-node
mod fence;
