//! The context that joins the spans of one call across processes.

use std::sync::OnceLock;
use tracing::Span;

/// A trace and the span in it that makes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// The id of the trace, as in W3C Trace Context.
    pub trace: [u8; 16],
    /// The id of the span.
    pub span: [u8; 8],
}

impl Context {
    /// The bytes of a context on the wire.
    pub const BYTES: usize = 24;

    /// The trace id, then the span id.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let (trace, span) = out.split_at_mut(16);
        trace.copy_from_slice(&self.trace);
        span.copy_from_slice(&self.span);
        out
    }

    /// Reads a context; `None` unless there are exactly [`Context::BYTES`] bytes and both ids are valid.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (trace, span) = bytes.split_at(16);
        let context = Self {
            trace: trace.try_into().ok()?,
            span: span.try_into().ok()?,
        };
        (context.trace != [0; 16] && context.span != [0; 8]).then_some(context)
    }
}

/// How the exporter of this process reads and joins contexts.
pub(crate) struct Hooks {
    pub(crate) current: fn() -> Option<Context>,
    /// Makes a span a child; before it is entered.
    pub(crate) join: fn(&Span, Context),
}

/// Empty until an exporter starts: without one, no request carries a context.
pub(crate) static HOOKS: OnceLock<Hooks> = OnceLock::new();

/// The context of the current span; `None` without an exporter, outside a span, or when the trace is not
/// sampled.
pub fn current() -> Option<Context> {
    HOOKS.get().and_then(|hooks| (hooks.current)())
}

/// Makes the span of a request with `make`, as a child of the span whose context the request carried as `from`.
/// Without a context there is no span: the sender chooses the calls that are traced.
pub fn below(from: &[u8], make: impl FnOnce() -> Span) -> Span {
    if from.is_empty() {
        return Span::none();
    }
    match (HOOKS.get(), Context::from_bytes(from)) {
        (Some(hooks), Some(context)) => {
            let span = make();
            (hooks.join)(&span, context);
            span
        }
        _ => Span::none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_read_as_it_was_written_and_nothing_else_is_one() {
        let context = Context {
            trace: [7; 16],
            span: [9; 8],
        };
        let bytes = context.to_bytes();
        assert_eq!(Context::from_bytes(&bytes), Some(context));
        assert_eq!(Context::from_bytes(&bytes[..23]), None);
        assert_eq!(Context::from_bytes(&[]), None);
        assert_eq!(Context::from_bytes(&[0; 24]), None);
        let mut no_span = bytes;
        no_span[16..].fill(0);
        assert_eq!(Context::from_bytes(&no_span), None);
    }

    #[test]
    fn without_an_exporter_a_span_is_disabled_and_a_request_carries_nothing() {
        let span = crate::span!("get", blocks = 1);
        assert!(span.is_disabled());
        let _inside = span.enter();
        assert_eq!(current(), None);
        let called = below(&[1; 24], || unreachable!("there is no exporter"));
        assert!(called.is_disabled());
    }
}
