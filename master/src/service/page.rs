//! The page at `/`, its snapshot, and its events.

use crate::overview::Watch;
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::StreamExt;
use std::convert::Infallible;
use std::sync::Arc;
use tokio_stream::wrappers::ReceiverStream;

/// The page. The nonces of its script and style tags are [`NONCE`], which each answer replaces.
const PAGE: &str = include_str!("page/page.html");
const NONCE: &str = "{{nonce}}";
const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";

/// The routes of the page.
pub(super) fn router(watch: Arc<Watch>) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/v1/overview", get(overview))
        .route("/v1/events", get(events))
        .with_state(watch)
}

/// Headers of every answer. They forbid caches, guessed content types and referrers.
const HEADERS: [(HeaderName, HeaderValue); 3] = [
    (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    (
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    ),
    (
        header::REFERRER_POLICY,
        HeaderValue::from_static("no-referrer"),
    ),
];

/// The page. Only its own script runs: a fresh nonce names it, and nothing is loaded from elsewhere.
async fn page() -> Response {
    let nonce = format!("{:032x}", kvpool_seams::random::<u128>());
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
         require-trusted-types-for 'script'"
    );
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::CONTENT_SECURITY_POLICY, policy),
    ];
    (HEADERS, headers, PAGE.replace(NONCE, &nonce)).into_response()
}

async fn overview(State(watch): State<Arc<Watch>>) -> Response {
    answer(JSON, watch.json(0))
}

async fn events(State(watch): State<Arc<Watch>>, headers: HeaderMap) -> Response {
    let last = headers.get("last-event-id");
    let last = last.and_then(|id| id.to_str().ok()?.parse().ok());
    let Some(listener) = watch.listeners.add() else {
        let told = "too many listeners: close a page, or ask /v1/overview\n";
        return (StatusCode::SERVICE_UNAVAILABLE, HEADERS, told).into_response();
    };
    let first = watch.event(last.unwrap_or(0));
    let events = futures::stream::iter([first]).chain(ReceiverStream::new(listener));
    answer(EVENTS, Body::from_stream(events.map(Ok::<_, Infallible>)))
}

fn answer(kind: &'static str, body: impl Into<Body>) -> Response {
    let kind = [(header::CONTENT_TYPE, HeaderValue::from_static(kind))];
    (HEADERS, kind, body.into()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The most bytes of the page.
    const MOST: usize = 40 << 10;

    #[test]
    fn the_page_is_small_and_loads_nothing() {
        assert!(PAGE.len() < MOST, "{} bytes", PAGE.len());
        assert_eq!(PAGE.matches("<script").count(), 1);
        assert_eq!(PAGE.matches("<style").count(), 1);
        assert_eq!(PAGE.matches(&format!(" nonce=\"{NONCE}\"")).count(), 2);
        for sink in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "style=\"",
            " onclick=",
            "src=",
            "@import",
        ] {
            assert!(!PAGE.contains(sink), "{sink}");
        }
    }

    #[tokio::test]
    async fn each_answer_has_its_own_nonce_and_a_strict_policy() {
        let mut policies = Vec::new();
        for _ in 0..2 {
            let answer = page().await;
            let policy = answer.headers()[header::CONTENT_SECURITY_POLICY].to_str();
            policies.push(policy.unwrap().to_owned());
        }
        assert_ne!(policies[0], policies[1]);
        assert!(policies[0].starts_with("default-src 'none'; script-src 'nonce-"));
        assert!(!policies[0].contains("unsafe"));
    }
}
