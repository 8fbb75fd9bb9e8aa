//! One trace joins client, master and store node, as an OpenTelemetry collector gets it.
//!
//! `cargo nextest run --workspace -E 'package(kvpool-tests) and test(tracing::)' --no-capture` prints the trace.

use anyhow::{Context, bail};
use kvpool_client::{
    Client, GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions, TransportChoice,
};
use kvpool_tests::blocks::{is_right, key, source, target};
use kvpool_tests::{Cluster, Options};
use kvpool_types::Key;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tonic::{Request, Response, Status};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// How long spans may take to arrive: exporters send every five seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// A collector that keeps what it receives: the service's name, and the span.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<(String, Span)>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut kept = self.0.lock().unwrap();
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.unwrap_or_default().attributes;
            let service = text(&attributes, "service.name").unwrap_or_default();
            let spans = resource.scope_spans.into_iter().flat_map(|s| s.spans);
            kept.extend(spans.map(|span| (service.clone(), span)));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    async fn start(&self) -> anyhow::Result<String> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let server =
            tonic::transport::Server::builder().add_service(TraceServiceServer::new(self.clone()));
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        tokio::spawn(server.serve_with_incoming(incoming));
        Ok(format!("http://{address}"))
    }

    /// The spans of the trace that begins with the span `name` of this many blocks, in order of
    /// time.
    fn trace_of(&self, name: &str, blocks: usize) -> Vec<(String, Span)> {
        let kept = self.0.lock().unwrap();
        let blocks = Some(blocks.to_string());
        let is_root = |(_, span): &&(String, Span)| {
            span.name == name
                && span.parent_span_id.is_empty()
                && text(&span.attributes, "blocks") == blocks
        };
        let Some((_, root)) = kept.iter().find(is_root) else {
            return Vec::new();
        };
        let of_it = |span: &&(String, Span)| span.1.trace_id == root.trace_id;
        let mut spans: Vec<_> = kept.iter().filter(of_it).cloned().collect();
        spans.sort_by_key(|(_, span)| span.start_time_unix_nano);
        spans
    }

    /// Waits until the trace has spans of all three services.
    async fn whole_trace_of(
        &self,
        name: &str,
        blocks: usize,
    ) -> anyhow::Result<Vec<(String, Span)>> {
        let limit = Instant::now() + PATIENCE;
        loop {
            let spans = self.trace_of(name, blocks);
            let services: BTreeSet<&str> = spans.iter().map(|(s, _)| s.as_str()).collect();
            if services.len() == 3 {
                return Ok(spans);
            }
            if Instant::now() > limit {
                let all = self.0.lock().unwrap();
                let names: Vec<_> = all.iter().map(|(s, span)| (s, &span.name)).collect();
                bail!("the trace of {name} has spans of {services:?} only; all spans: {names:?}");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn show(value: &KeyValue) -> String {
    match value.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(other) => format!("{other:?}"),
        None => String::new(),
    }
}

fn text(attributes: &[KeyValue], key: &str) -> Option<String> {
    attributes.iter().find(|kv| kv.key == key).map(show)
}

/// A span and the spans below it, one line each.
fn tree(spans: &[(String, Span)], parent: &[u8], depth: usize, out: &mut String) {
    for (service, span) in spans
        .iter()
        .filter(|(_, span)| span.parent_span_id == parent)
    {
        let micros = (span.end_time_unix_nano - span.start_time_unix_nano) / 1000;
        let values = span.attributes.iter().filter(|kv| {
            !matches!(
                kv.key.as_str(),
                "busy_ns" | "idle_ns" | "incarnation" | "client"
            )
        });
        let values: Vec<_> = values
            .map(|kv| format!("{}={}", kv.key, show(kv)))
            .collect();
        let name = format!("{:indent$}{}", "", span.name, indent = depth * 2);
        let values = values.join(" ");
        let line = format!("{name:<20} {service:<13} {micros:>6} us  {values}");
        writeln!(out, "{}", line.trim_end()).unwrap();
        tree(spans, &span.span_id, depth + 1, out);
    }
}

/// A span below `parent` of another service.
fn child<'a>(
    spans: &'a [(String, Span)],
    parent: &Span,
    service: &str,
    name: &str,
) -> anyhow::Result<&'a Span> {
    let found = spans.iter().find(|(of, span)| {
        of == service && span.name == name && span.parent_span_id == parent.span_id
    });
    Ok(&found
        .with_context(|| format!("no {name} of {service} below {}", parent.name))?
        .1)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_spans_of_a_batch_get_share_a_trace_in_client_master_and_node() -> anyhow::Result<()> {
    let collector = Collector::default();
    let endpoint = collector.start().await?;
    let flags = ["--otlp-endpoint".to_owned(), endpoint.clone()];
    let mut options = Options::default().master(&[&flags[0], &flags[1]]);
    options.node.extend(flags);
    let cluster = Cluster::start(options)?;

    // As a worker's process does it with KVPOOL_OTLP_ENDPOINT.
    let (layer, export) = kvpool_trace::layer(&endpoint, "worker")?;
    tracing_subscriber::registry().with(layer).try_init()?;

    // A small batch goes over the control channel, a large one over the lanes.
    let rounds = [(4, 16 << 10), (3, 256 << 10)];
    for (blocks, size) in rounds {
        move_blocks(&cluster, blocks, size).await?;
    }
    // Sends the remaining spans of the client.
    tokio::task::spawn_blocking(move || drop(export)).await?;

    for (blocks, size) in rounds {
        for name in ["put", "get"] {
            let spans = collector.whole_trace_of(name, blocks).await?;
            let id = spans[0].1.trace_id.iter().map(|byte| format!("{byte:02x}"));
            let mut shown = String::new();
            tree(&spans, &[], 0, &mut shown);
            let id: String = id.collect();
            println!("{name} of {blocks} blocks of {size} bytes: trace {id}\n{shown}");
        }
        let spans = collector.whole_trace_of("get", blocks).await?;
        let root = &spans[0].1;
        let lookup = child(&spans, root, "worker", "Lookup")?;
        child(&spans, lookup, "kvmaster", "lookup")?;
        let read = child(&spans, root, "worker", "read")?;
        child(&spans, read, "kvstore-node", "read")?;
        let spans = collector.whole_trace_of("put", blocks).await?;
        let root = &spans[0].1;
        let write = child(&spans, root, "worker", "write")?;
        child(&spans, write, "kvstore-node", "write")?;
        let commit = child(&spans, root, "worker", "Commit")?;
        let commit = child(&spans, commit, "kvmaster", "commit")?;
        child(&spans, commit, "kvmaster", "journal append")?;
    }
    Ok(())
}

/// One client puts a batch. Another client without cached locations gets it.
async fn move_blocks(cluster: &Cluster, blocks: usize, size: usize) -> anyhow::Result<()> {
    let over_tcp = kvpool_client::Options {
        transport: TransportChoice::Tcp,
        ..cluster.client_options()
    };
    let keys: Vec<Key> = (0..blocks as u64).map(|n| key(size as u64 + n)).collect();
    let writer = Client::connect(over_tcp.clone()).await?;
    let puts = keys
        .iter()
        .map(|key| PutBlock::new(key.clone(), source(key, size)));
    for put in writer
        .batch_put(puts.collect(), &PutOptions::default())
        .await
    {
        put?;
    }
    let reader = Client::connect(over_tcp).await?;
    let targets: Vec<_> = keys.iter().map(|_| target(size)).collect();
    let gets = keys.iter().zip(&targets);
    let gets = gets.map(|(key, target)| GetBlock::new(key.clone(), target.clone()));
    let outcomes = reader
        .batch_get(gets.collect(), &GetOptions::default())
        .await;
    for ((key, target), outcome) in keys.iter().zip(&targets).zip(outcomes) {
        assert!(matches!(outcome?, GetOutcome::Hit { .. }));
        assert!(is_right(key, target, size));
    }
    Ok(())
}
