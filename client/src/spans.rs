//! The spans of transfers. Their fields are computed only if a subscriber wants spans.

use crate::cache::KnownNode;
use kvpool_transport::TransportKind;
use tracing::Span;

/// The span of a transfer with one store node.
pub(crate) fn transfer(
    name: &'static str,
    kind: TransportKind,
    node: &KnownNode,
    blocks: usize,
    bytes: u64,
) -> Span {
    kvpool_trace::span!(
        "transfer",
        otel.name = name,
        otel.kind = "client",
        transport = ?kind,
        node = %node.name,
        incarnation = %node.incarnation,
        blocks,
        bytes,
    )
}

/// The span of a read that the calling thread does at once, without a message to the node.
pub(crate) fn inline_read(kind: TransportKind, node: &KnownNode, blocks: usize) -> Span {
    kvpool_trace::span!(
        "read inline",
        transport = ?kind,
        node = %node.name,
        incarnation = %node.incarnation,
        blocks,
    )
}
