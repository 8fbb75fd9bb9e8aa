//! The HTTP port: metrics for Prometheus, probes for an orchestrator, and routes of the daemon.

use crate::callers::{Caller, Callers};
use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use kvpool_tls::tokio_rustls::TlsAcceptor;
use kvpool_tls::{Port, ServerTls};
use prometheus::{Registry, TextEncoder};
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// The content type of `/metrics`: version 0.0.4 of Prometheus' text format.
pub const METRICS_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How long requests in progress may take after shutdown began.
const DRAIN: Duration = Duration::from_secs(3);
/// How long a request's head may take to arrive.
const HEAD: Duration = Duration::from_secs(5);
/// The longest life of a connection. A connection carries one request.
const LONGEST: Duration = Duration::from_secs(30);
/// The most connections whose request has not arrived. A further one closes the oldest.
const MOST_CALLERS: usize = 256;
/// The most connections whose request has arrived. A further one closes the oldest.
const MOST_ANSWERED: usize = 512;
/// The most requests in progress. Further requests get status 503.
const MOST_REQUESTS: usize = 256;
/// The largest head of a request, in bytes.
const MOST_HEAD: u16 = 16 << 10;

/// The state of a daemon. Every probe calls these methods, so they must answer from memory, without waiting.
pub trait Health: Send + Sync + 'static {
    /// Whether the process works. The error names the fault. An orchestrator restarts a process
    /// that keeps failing this probe.
    fn healthy(&self) -> Result<(), String>;

    /// Whether the process can take work now. The error says why it cannot. An orchestrator sends
    /// no work while this probe fails.
    fn ready(&self) -> Result<(), String>;

    /// Sets the gauges that are computed on demand. `/metrics` calls this before it gathers.
    fn refresh_gauges(&self) {}
}

/// The routes that every daemon has, to be merged with its own:
///
/// - `/metrics`: the metrics of `registry`, in Prometheus' text format;
/// - `/healthz` and `/readyz`: 200 with `ok`, or 503 with the reason. `/health` is an alias of `/healthz`, which
///   probes of Mooncake's processes use.
pub fn router(registry: Registry, health: Arc<dyn Health>) -> Router {
    let (ready, alias) = (Arc::clone(&health), Arc::clone(&health));
    let gauges = Arc::clone(&health);
    let gather = async move || {
        gauges.refresh_gauges();
        metrics(&registry)
    };
    Router::new()
        .route("/metrics", get(gather))
        .route("/health", get(async move || probe(alias.healthy())))
        .route("/healthz", get(async move || probe(health.healthy())))
        .route("/readyz", get(async move || probe(ready.ready())))
}

/// Makes `router` answer gRPC calls, which belong to another port, with a gRPC error that names
/// that port.
///
/// Without this answer a caller would get "no such call", and would suspect a daemon of another version.
pub fn redirect_grpc(router: Router, elsewhere: Elsewhere) -> Router {
    let elsewhere = Arc::new(elsewhere);
    router.layer(axum::middleware::from_fn(
        move |request: Request, next: Next| {
            let elsewhere = Arc::clone(&elsewhere);
            async move {
                let kind = request.headers().get(header::CONTENT_TYPE);
                let is_grpc =
                    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
                if is_grpc {
                    elsewhere.answer()
                } else {
                    next.run(request).await
                }
            }
        },
    ))
}

/// The answer to gRPC calls that arrive at the HTTP port by mistake.
#[derive(Clone, Debug)]
pub struct Elsewhere {
    /// The message. It names this port and the port for gRPC.
    pub text: String,
    /// The metadata that carries the stable code, and the code.
    pub code: (&'static str, u16),
}

impl Elsewhere {
    fn answer(&self) -> Response {
        /// gRPC's status code: the caller's argument, the address, is wrong.
        const INVALID_ARGUMENT: &str = "3";
        let (name, code) = self.code;
        let mut response = Response::default();
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/grpc"),
        );
        headers.insert("grpc-status", HeaderValue::from_static(INVALID_ARGUMENT));
        headers.insert(name, HeaderValue::from(code));
        // gRPC's messages are percent-encoded; a text that would need it is not an address.
        if let Ok(text) = HeaderValue::from_str(&self.text) {
            headers.insert("grpc-message", text);
        }
        response
    }
}

/// Serves `router` on `listener` until `shutdown` ends and the requests then in progress have been
/// answered, or 3 seconds have passed. With `tls` it speaks TLS only.
///
/// A connection carries one request. Any host that reaches the port can call it. So these are bounded: the size of a
/// request's head, its time to arrive, the connections without a request, and the requests.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    tls: Option<ServerTls>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let callers = Callers::new(MOST_CALLERS, u64::MAX);
    let answered = Callers::new(MOST_ANSWERED, u64::MAX);
    let places = Arc::new(Semaphore::new(MOST_REQUESTS));
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let port = Answers {
                    router: router.clone(),
                    answered: Arc::clone(&answered),
                    places: Arc::clone(&places),
                };
                let caller = callers.admit();
                match tls.clone() {
                    None => connections.spawn(port.converse(stream, caller)),
                    Some(tls) => connections.spawn(async move {
                        if let Some(stream) = handshake(stream, &tls, &caller).await {
                            port.converse(stream, caller).await;
                        }
                    }),
                };
            }
            Err(error) => {
                // The process has most likely run out of descriptors. Callers hold some of them.
                tracing::warn!(%error, "cannot accept an HTTP connection");
                if !callers.displace_oldest() && !answered.displace_oldest() {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
    drop(listener);
    callers.displace_all();
    let ended = async { while connections.join_next().await.is_some() {} };
    let _cut_off = tokio::time::timeout(DRAIN, ended).await;
    Ok(())
}

/// Makes the TLS handshake within the caller's time; `None` when it failed.
async fn handshake(
    stream: TcpStream,
    tls: &ServerTls,
    caller: &Caller,
) -> Option<impl AsyncRead + AsyncWrite + Unpin + Send + 'static> {
    let accepted = TlsAcceptor::from(tls.config(Port::Http)).accept(stream);
    tokio::select! {
        accepted = tokio::time::timeout(HEAD, accepted) => match accepted {
            Ok(Ok(stream)) => return Some(stream),
            Ok(Err(error)) => tracing::debug!(%error, "TLS handshake of an HTTP connection failed"),
            Err(_) => tracing::debug!("HTTP connection closed: no TLS handshake within {HEAD:?}"),
        },
        () = caller.displaced() => {}
    }
    None
}

/// How a port answers.
struct Answers {
    router: Router,
    /// The connections whose request has arrived. A slow peer may take long to read the answer.
    answered: Arc<Callers>,
    places: Arc<Semaphore>,
}

impl Answers {
    /// Serves one connection.
    async fn converse(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        caller: Caller,
    ) {
        let Self {
            router,
            answered,
            places,
        } = self;
        let caller = Arc::new(caller);
        let router = TowerToHyperService::new(router);
        let heard = Arc::clone(&caller);
        let (came, mut coming) = watch::channel(false);
        let service = service_fn(move |request: hyper::Request<Incoming>| {
            heard.settle();
            let _ = came.send(true);
            let place = Arc::clone(&places).try_acquire_owned();
            let router = router.clone();
            async move {
                match place {
                    Ok(_place) => router.call(request).await,
                    Err(_) => Ok(probe(Err("too many requests at once".to_owned()))),
                }
            }
        });
        // HTTP/2 is for gRPC calls, which [`redirect_grpc`] answers.
        let mut http = auto::Builder::new(TokioExecutor::new());
        http.http1()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .max_buf_size(MOST_HEAD.into())
            .keep_alive(false);
        http.http2()
            .timer(TokioTimer::new())
            .max_header_list_size(MOST_HEAD.into())
            .max_concurrent_streams(1);
        let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
        // The library detects the version of HTTP without a time limit.
        let heard = tokio::select! {
            ended = connection.as_mut() => {
                tell_end(ended);
                return;
            }
            heard = tokio::time::timeout(HEAD, coming.changed()) => heard,
            () = caller.displaced() => return,
        };
        if heard.is_err() {
            tracing::debug!("HTTP connection closed: no request within {HEAD:?}");
            return;
        }
        let place = answered.admit();
        // An HTTP/2 connection would take further requests.
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            ended = tokio::time::timeout(LONGEST, connection) => match ended {
                Ok(ended) => tell_end(ended),
                Err(_) => tracing::debug!("HTTP connection closed: still open after {LONGEST:?}"),
            },
            () = place.displaced() => {}
        }
    }
}

fn tell_end<E: std::fmt::Display>(ended: Result<(), E>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "HTTP connection failed");
    }
}

fn metrics(registry: &Registry) -> Response {
    match TextEncoder::new().encode_to_string(&registry.gather()) {
        Ok(text) => ([(header::CONTENT_TYPE, METRICS_CONTENT_TYPE)], text).into_response(),
        Err(error) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("cannot encode the metrics: {error}\n"),
        )
            .into_response(),
    }
}

fn probe(outcome: Result<(), String>) -> Response {
    match outcome {
        Ok(()) => "ok\n".into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus::IntCounter;
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::oneshot;
    use tokio::task::JoinHandle;
    use tokio::time::timeout;

    #[derive(Default)]
    struct State {
        broken: AtomicBool,
        waiting: AtomicBool,
    }

    impl Health for State {
        fn healthy(&self) -> Result<(), String> {
            match self.broken.load(Ordering::Relaxed) {
                true => Err("the store is gone".into()),
                false => Ok(()),
            }
        }

        fn ready(&self) -> Result<(), String> {
            match self.waiting.load(Ordering::Relaxed) {
                true => Err("waits for the master".into()),
                false => Ok(()),
            }
        }
    }

    struct Server {
        addr: SocketAddr,
        state: Arc<State>,
        stop: oneshot::Sender<()>,
        task: JoinHandle<io::Result<()>>,
    }

    async fn start(extra: Router) -> Server {
        start_with(extra, |router| router).await
    }

    async fn start_with(extra: Router, wrap: impl FnOnce(Router) -> Router) -> Server {
        let state = Arc::new(State::default());
        let registry = Registry::new();
        let counter = IntCounter::new("kvpool_test_total", "A test's counter.").unwrap();
        counter.inc_by(7);
        registry.register(Box::new(counter)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let router = wrap(router(registry, Arc::clone(&state) as _).merge(extra));
        let task = tokio::spawn(serve(listener, router, None, async {
            stopped.await.unwrap();
        }));
        Server {
            addr,
            state,
            stop,
            task,
        }
    }

    async fn fetch(addr: SocketAddr, path: &str) -> (u16, String, String) {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_owned(), body.to_owned())
    }

    #[tokio::test]
    async fn metrics_come_in_the_text_format_under_its_content_type() {
        let server = start(Router::new()).await;
        let (status, head, body) = fetch(server.addr, "/metrics").await;
        assert_eq!(status, 200);
        assert!(
            head.lines()
                .any(|line| line == "content-type: text/plain; version=0.0.4; charset=utf-8"),
            "{head}"
        );
        assert!(body.contains("# TYPE kvpool_test_total counter\nkvpool_test_total 7\n"));
    }

    #[tokio::test]
    async fn probes_tell_health_and_readiness_apart() {
        let server = start(Router::new()).await;
        for path in ["/health", "/healthz", "/readyz"] {
            let (status, _, body) = fetch(server.addr, path).await;
            assert_eq!((status, body.as_str()), (200, "ok\n"));
        }
        server.state.waiting.store(true, Ordering::Relaxed);
        assert_eq!(fetch(server.addr, "/healthz").await.0, 200);
        let (status, _, body) = fetch(server.addr, "/readyz").await;
        assert_eq!((status, body.as_str()), (503, "waits for the master\n"));
        server.state.broken.store(true, Ordering::Relaxed);
        let (status, _, body) = fetch(server.addr, "/healthz").await;
        assert_eq!((status, body.as_str()), (503, "the store is gone\n"));
    }

    #[tokio::test]
    async fn a_daemon_adds_its_own_routes() {
        let server = start(Router::new().route("/nodes", get(async || "[]"))).await;
        assert_eq!(fetch(server.addr, "/nodes").await.2, "[]");
        assert_eq!(fetch(server.addr, "/healthz").await.0, 200);
        assert_eq!(fetch(server.addr, "/none").await.0, 404);
    }

    #[tokio::test]
    async fn a_grpc_call_is_told_where_it_belongs_and_nobody_else_notices() {
        let elsewhere = Elsewhere {
            text: "the pool is at 10.0.0.1:7070".to_owned(),
            code: ("kvpool-code", 3),
        };
        let router = Router::new().route("/nodes", get(async || "[]"));
        let server = start_with(router, |router| redirect_grpc(router, elsewhere)).await;
        assert_eq!(fetch(server.addr, "/nodes").await.2, "[]");
        let mut stream = TcpStream::connect(server.addr).await.unwrap();
        let call = "POST /kvpool.Pool/Hello HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
                    content-type: application/grpc+proto\r\ncontent-length: 0\r\n\r\n";
        stream.write_all(call.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        for line in [
            "HTTP/1.1 200 OK",
            "grpc-status: 3",
            "kvpool-code: 3",
            "grpc-message: the pool is at 10.0.0.1:7070",
        ] {
            assert!(answer.lines().any(|is| is == line), "{line} in {answer}");
        }
    }

    /// Asks over HTTP/2, as a caller that sends its frames by hand.
    async fn ask_http2(addr: SocketAddr) -> TcpStream {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        // GET http://x/healthz, with nothing after it.
        let mut head = vec![0x82, 0x86, 0x04, 8];
        head.extend_from_slice(b"/healthz");
        head.extend_from_slice(&[0x01, 1, b'x']);
        bytes.extend_from_slice(&settings);
        bytes.extend_from_slice(&[0, 0, u8::try_from(head.len()).unwrap(), 1, 5, 0, 0, 0, 1]);
        bytes.extend_from_slice(&head);
        stream.write_all(&bytes).await.unwrap();
        stream
    }

    /// Reads frames to the connection's end. Answers pings where that is asked. Gives the frames' types.
    async fn frames(stream: &mut TcpStream, answers_pings: bool) -> Vec<u8> {
        const PING: u8 = 6;
        let mut types = Vec::new();
        let mut head = [0; 9];
        while stream.read_exact(&mut head).await.is_ok() {
            let [high, middle, low, kind, flags, ..] = head;
            let mut body =
                vec![0; usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low)];
            stream.read_exact(&mut body).await.unwrap();
            types.push(kind);
            if kind == PING && flags == 0 && answers_pings {
                let mut pong = vec![0, 0, 8, PING, 1, 0, 0, 0, 0];
                pong.extend_from_slice(&body);
                stream.write_all(&pong).await.unwrap();
            }
        }
        types
    }

    #[tokio::test]
    async fn an_http2_connection_ends_after_its_answer() {
        let server = start(Router::new()).await;
        let mut stream = ask_http2(server.addr).await;
        let frames = timeout(HEAD, frames(&mut stream, true)).await.unwrap();
        const DATA: u8 = 0;
        assert!(frames.contains(&DATA), "{frames:?}");
    }

    #[tokio::test]
    async fn connections_that_linger_after_their_answer_are_bounded() {
        let server = start(Router::new()).await;
        let mut lingering = Vec::new();
        for _ in 0..MOST_ANSWERED + 20 {
            lingering.push(ask_http2(server.addr).await);
        }
        // The oldest made room for the newest.
        for mut stream in lingering.drain(..20) {
            timeout(HEAD, frames(&mut stream, false)).await.unwrap();
        }
        assert_eq!(fetch(server.addr, "/healthz").await.0, 200);
    }

    #[tokio::test]
    async fn it_ends_when_told_to_with_an_idle_connection_open() {
        let server = start(Router::new()).await;
        let _idle = TcpStream::connect(server.addr).await.unwrap();
        server.stop.send(()).unwrap();
        timeout(2 * DRAIN, server.task)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        TcpStream::connect(server.addr).await.unwrap_err();
    }

    #[tokio::test]
    async fn a_request_that_never_ends_does_not_hold_up_the_shutdown() {
        let hang = Router::new().route("/hang", get(std::future::pending::<&'static str>));
        let server = start(hang).await;
        let mut stream = TcpStream::connect(server.addr).await.unwrap();
        stream
            .write_all(b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        // A second request on its own connection is answered after the first has been taken up.
        fetch(server.addr, "/healthz").await;
        server.stop.send(()).unwrap();
        timeout(2 * DRAIN, server.task)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
    }

    #[tokio::test]
    async fn half_a_request_ends_and_displaces_nobody() {
        let server = start(Router::new()).await;
        let mut half = Vec::new();
        for _ in 0..2 * MOST_CALLERS {
            let mut stream = TcpStream::connect(server.addr).await.unwrap();
            stream
                .write_all(b"GET /healthz HTTP/1.1\r\nho")
                .await
                .unwrap();
            half.push(stream);
        }
        // Others are served meanwhile, and the oldest are gone already.
        assert_eq!(fetch(server.addr, "/healthz").await.0, 200);
        let first = half.first_mut().unwrap();
        assert_eq!(first.read(&mut [0; 1]).await.unwrap_or(0), 0);
        let last = half.last_mut().unwrap();
        let mut rest = Vec::new();
        let ended = timeout(4 * HEAD, last.read_to_end(&mut rest)).await;
        assert!(ended.is_ok(), "half a request is kept for ever");
    }

    #[tokio::test]
    async fn a_head_has_a_bounded_size() {
        let server = start(Router::new()).await;
        let mut stream = TcpStream::connect(server.addr).await.unwrap();
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\n")
            .await
            .unwrap();
        let line = format!("a: {}\r\n", "b".repeat(1000));
        let mut sent = 0;
        while stream.write_all(line.as_bytes()).await.is_ok() {
            sent += line.len();
            assert!(sent < 64 << 20, "a head of {sent} bytes is taken");
        }
        assert_eq!(fetch(server.addr, "/healthz").await.0, 200);
    }
}
