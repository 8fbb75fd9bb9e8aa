//! Calls over gRPC without a generated client, with any path, headers and body. Also a check that
//! an answer reveals nothing.

use anyhow::{Context, anyhow, ensure};
use http_body_util::{BodyExt, Full};
use kvpool_proto as proto;
use kvpool_types::Code;
use prost::Message;
use std::future::poll_fn;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Channel;

/// The answer to a call.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status of HTTP.
    pub http: u16,
    /// The status of gRPC; `None` if the HTTP status ended the call.
    pub grpc: Option<u32>,
    /// The message, if there is one.
    pub message: Option<Vec<u8>>,
    /// Every byte of the answer, with all headers and trailers.
    pub all: Vec<u8>,
}

/// The body of a call with one message.
pub fn body_of(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    [&[0], &length.to_be_bytes()[..], message].concat()
}

/// Makes a call. Fails if the connection ends, or if the answer is not a gRPC answer.
pub async fn ask(
    channel: &Channel,
    head: http::request::Builder,
    body: Vec<u8>,
) -> anyhow::Result<Answer> {
    let request = head.body(Body::new(Full::new(bytes::Bytes::from(body))))?;
    let mut channel = channel.clone();
    poll_fn(|context| channel.poll_ready(context)).await?;
    let answer = channel.call(request).await?;
    let (head, body) = answer.into_parts();
    let body = body.collect().await;
    let body = body.map_err(|status| anyhow!("the answer ended early: {status}"))?;
    let trailers = body.trailers().cloned().unwrap_or_default();
    let body = body.to_bytes();
    let mut all = body.to_vec();
    for (name, value) in head.headers.iter().chain(trailers.iter()) {
        all.extend(name.as_str().as_bytes());
        all.extend(value.as_bytes());
    }
    let status = trailers
        .get("grpc-status")
        .or(head.headers.get("grpc-status"));
    let grpc = match status {
        Some(status) => Some(status.to_str()?.parse()?),
        None => None,
    };
    let http = head.status.as_u16();
    ensure!(grpc.is_some() || http >= 400, "no status: {head:?}");
    let message = match body.split_first_chunk::<5>() {
        None => None,
        Some(([0, length @ ..], message)) => {
            let length = usize::try_from(u32::from_be_bytes(*length))?;
            ensure!(message.len() == length, "not one message: {head:?}");
            Some(message.to_vec())
        }
        Some(_) => anyhow::bail!("a compressed answer: {head:?}"),
    };
    ensure!(grpc != Some(0) || message.is_some(), "no message: {head:?}");
    Ok(Answer {
        http,
        grpc,
        message,
        all,
    })
}

/// The fact about blocks, nodes and namespaces that an answer to the call at `path` reveals, if
/// any. The caller may know only the empty namespace `own`. Fails if the answer is not an answer to
/// this call.
pub fn gives_away(path: &str, answer: &Answer, own: &str) -> anyhow::Result<Option<String>> {
    let Some(message) = answer.message.as_deref().filter(|_| answer.grpc == Some(0)) else {
        return Ok(None);
    };
    let name = path.rsplit('/').next().unwrap_or_default();
    macro_rules! said {
        ($reply:ident, |$it:ident| $is_told:expr) => {{
            let $it = proto::$reply::decode(message).with_context(|| path.to_owned())?;
            let is_told: bool = $is_told;
            is_told.then(|| format!("{path}: {:?}", $it))
        }};
    }
    let ok = u32::from(Code::Ok.to_wire());
    let exists = u32::from(Code::Exists.to_wire());
    Ok(match name {
        "Hello" => said!(HelloReply, |_it| false),
        "CreateNamespace" => said!(CreateNamespaceReply, |_it| false),
        "ListNamespaces" => said!(ListNamespacesReply, |it| {
            let names = it.namespaces.iter().map(|used| &used.namespace);
            names.flatten().any(|namespace| namespace.name != own)
        }),
        "Reserve" => said!(ReserveReply, |it| {
            let codes = it.reservations.iter().map(|one| one.code);
            let columns = it.columns.iter().flat_map(|columns| &columns.codes);
            codes.chain(columns.copied()).any(|code| code == exists)
        }),
        "Commit" => said!(Outcomes, |it| it.codes.contains(&ok)),
        "Revoke" | "Release" | "ReportReplicas" => said!(Outcomes, |_it| false),
        "Lookup" => said!(LookupReply, |it| {
            let is_there = |one: &proto::Location| one.code == ok || !one.replicas.is_empty();
            !it.nodes.is_empty() || it.locations.iter().any(is_there)
        }),
        "Exist" => said!(ExistReply, |it| it.present.iter().any(|bits| *bits != 0)),
        "MatchPrefix" => said!(MatchPrefixReply, |it| it.blocks > 0),
        "Renew" => said!(RenewReply, |it| it.codes.contains(&ok)),
        "Remove" => said!(RemoveReply, |it| it.removed + it.kept > 0),
        "List" => said!(ListReply, |it| !it.blocks.is_empty()),
        "Describe" => said!(DescribeReply, |it| {
            it.descriptions.iter().any(|one| one.code == ok)
        }),
        "Stats" => said!(StatsReply, |it| {
            !it.nodes.is_empty()
                || !it.media.is_empty()
                || it.namespaces.iter().any(|name| name != own)
        }),
        "Cluster" => said!(ClusterReply, |it| !it.overview.is_empty()),
        // A call that only an administrator may make.
        _ => Some(format!("{path} was answered")),
    })
}
