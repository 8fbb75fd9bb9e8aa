//! The export over OTLP.

use crate::context::{Context, HOOKS, Hooks};
use crate::start::{BoxedLayer, Export, StartError};
use opentelemetry::trace::{
    SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState, TracerProvider,
};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::runtime::Runtime;
use tracing::{Level, Span, Subscriber};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::registry::LookupSpan;

/// From then on requests carry the context of the current span, and spans here join the contexts of peers. For
/// programs with a `tracing-opentelemetry` layer of their own; [`crate::layer`] includes this call.
pub fn propagate() {
    // A second call finds the same functions there.
    let _set = HOOKS.set(Hooks { current, join });
}

fn current() -> Option<Context> {
    let context = Span::current().context();
    let span = context.span();
    let ids = span.span_context();
    (ids.is_valid() && ids.is_sampled()).then(|| Context {
        trace: ids.trace_id().to_bytes(),
        span: ids.span_id().to_bytes(),
    })
}

fn join(span: &Span, from: Context) {
    let parent = SpanContext::new(
        TraceId::from_bytes(from.trace),
        SpanId::from_bytes(from.span),
        TraceFlags::SAMPLED,
        true,
        TraceState::NONE,
    );
    let parent = opentelemetry::Context::new().with_remote_span_context(parent);
    if let Err(error) = span.set_parent(parent) {
        tracing::debug!(%error, "span not joined to its caller's trace");
    }
}

/// The parts of a running export.
#[derive(Debug)]
pub(crate) struct Exporting {
    provider: SdkTracerProvider,
    /// Drives the connection to the collector: an exporter must not depend on the runtime that it observes.
    runtime: Option<Runtime>,
}

impl Drop for Exporting {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::warn!(%error, "last spans not sent to the OTLP collector");
        }
        if let Some(runtime) = self.runtime.take() {
            // Dropping a runtime inside another one panics.
            runtime.shutdown_background();
        }
    }
}

pub(crate) fn layer<S>(
    endpoint: &str,
    service: &'static str,
) -> Result<(BoxedLayer<S>, Export), StartError>
where
    S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
{
    let refused = |reason: String| StartError::BadEndpoint {
        endpoint: endpoint.to_owned(),
        reason,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("kvpool-otlp")
        .enable_all()
        .build()
        .map_err(|error| refused(error.to_string()))?;
    let exporter = {
        let _inside = runtime.enter();
        SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .build()
            .map_err(|error| refused(error.to_string()))?
    };
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(Resource::builder().with_service_name(service).build())
        .build();
    propagate();
    // Only spans of kvpool: the libraries below have spans too, also the libraries that carry the
    // export.
    let ours = Targets::new().with_target(crate::TARGET, Level::DEBUG);
    let layer = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("kvpool"))
        .with_location(false)
        .with_threads(false)
        .with_target(false)
        .with_level(false)
        .with_tracked_inactivity(false)
        .with_filter(ours);
    let exporting = Exporting {
        provider,
        runtime: Some(runtime),
    };
    Ok((Box::new(layer), Export(exporting)))
}
