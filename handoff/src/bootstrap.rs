//! The HTTP server of the bootstrap registry (row S2).

use crate::Moment;
use crate::registry::{BootstrapRegistry, HttpReply, HttpRequest, RegistryOptions};
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

struct Shared {
    registry: Mutex<BootstrapRegistry>,
    origin: Instant,
}

/// A bootstrap server. Its limits on callers are those of a daemon's HTTP port. Dropping it ends the server.
pub struct BootstrapServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<io::Result<()>>,
}

impl std::fmt::Debug for BootstrapServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BootstrapServer({})", self.address)
    }
}

impl BootstrapServer {
    /// Serves an empty registry on `listener`, on the runtime of the caller.
    ///
    /// # Errors
    ///
    /// The listener cannot report its address.
    pub fn start(listener: TcpListener, options: RegistryOptions) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            registry: Mutex::new(BootstrapRegistry::new(options)),
            origin: Instant::now(),
        });
        let router = Router::new()
            .fallback(answer)
            .layer(DefaultBodyLimit::max(options.max_body))
            .with_state(shared);
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async move {
            // A dropped sender stops the server too.
            drop(stopped.await);
        };
        let task = tokio::spawn(kvpool_daemon::probe::serve(
            listener, router, None, shutdown,
        ));
        Ok(Self {
            address,
            stop: Some(stop),
            task,
        })
    }

    /// The address of the server.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers the requests in progress, then ends the server.
    ///
    /// # Errors
    ///
    /// The error with which the server ended before this call.
    pub async fn stop(mut self) -> io::Result<()> {
        drop(self.stop.take());
        let task = &mut self.task;
        task.await.map_err(io::Error::other)?
    }
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> Response {
    let request = HttpRequest {
        method: method.as_str(),
        path: uri.path(),
        query: uri.query().unwrap_or_default(),
        body: &body,
    };
    let now = Moment(shared.origin.elapsed());
    let HttpReply {
        status,
        is_json,
        body,
    } = shared.registry.lock().handle(now, &request);
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let kind = match is_json {
        true => "application/json",
        false => "text/plain; charset=utf-8",
    };
    (status, [(header::CONTENT_TYPE, kind)], body).into_response()
}
