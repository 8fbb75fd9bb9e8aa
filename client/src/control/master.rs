//! One master: its gRPC channel and its framed connections.

use super::framed::{self, Framed};
use super::known::Known;
use super::messages::Message;
use super::status;
use crate::clock::Deadline;
use crate::errors::{ConnectError, ControlError, is_about_the_token};
use futures::future::BoxFuture;
use kvpool_auth::Credentials;
use kvpool_proto::pool_client::PoolClient;
use kvpool_proto::{Caller, ClusterReply, ClusterRequest, HelloRequest, MAX_MESSAGE_BYTES};
use kvpool_tls::ClientTls;
use kvpool_tls::grpc::GrpcWay;
use kvpool_types::Code;
use prost::Message as _;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tokio::runtime::Handle;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;

/// How long opening a connection to a master may take.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The interval of pings to a master that has calls to answer and sends nothing.
pub(super) const PING_INTERVAL: Duration = Duration::from_millis(500);
/// The time limit of the answer to such a ping.
pub(super) const PING_TIMEOUT: Duration = Duration::from_secs(1);

/// The most framed connections to one master. A master answers the calls of one connection on one thread. So
/// a large batch in several messages uses two connections.
const CONNECTIONS: usize = 2;

/// A simulated network, which carries calls to masters without sockets.
pub(crate) trait Carry: Send + Sync + std::fmt::Debug {
    /// Calls `method` of the master at `address` with an encoded request, and returns the encoded reply.
    fn carry(
        &self,
        address: &str,
        method: &'static str,
        request: bytes::Bytes,
    ) -> BoxFuture<'static, Result<bytes::Bytes, NotCarried>>;
}

/// The failure of a call over a simulated network.
#[cfg_attr(
    not(feature = "simulation"),
    expect(dead_code, reason = "only a simulation makes one")
)]
#[derive(Debug)]
pub(crate) enum NotCarried {
    /// The master cannot be reached and has not received the call.
    NoWay(String),
    /// The master answered with this status, or the connection broke.
    Failed(tonic::Status),
}

/// One master, with its connections.
#[derive(Debug)]
pub(super) struct Master {
    /// `http://host:port` or `https://host:port`.
    pub(super) address: String,
    pool: PoolClient<Channel>,
    credentials: Credentials,
    /// Each is opened at its first call. All but the first carry concurrent calls only.
    framed: [Framed; CONNECTIONS],
    /// The simulated network, if there is one.
    carrier: Option<Arc<dyn Carry>>,
}

/// The options of one message.
#[derive(Debug)]
pub(super) struct Sending<'a> {
    /// The time by which the message must have been answered.
    pub(super) deadline: Deadline,
    /// The identity and term for opening a framed connection; `None` to use gRPC.
    pub(super) framed: Option<&'a Known>,
    /// The number of the framed connection to use, modulo their count.
    pub(super) connection: usize,
}

/// The failure of a message without a usable answer.
#[derive(Debug)]
pub(super) struct Unanswered {
    pub(super) error: ControlError,
    /// Whether the master may have received the message.
    pub(super) sent: bool,
}

impl From<ControlError> for Unanswered {
    fn from(error: ControlError) -> Self {
        Self { error, sent: true }
    }
}

impl Master {
    /// The master at `address`, called with `tls` if the address asks for it. The first call connects. The
    /// connection's tasks run on `background`.
    pub(super) fn new(
        address: &str,
        spin: Duration,
        credentials: &Credentials,
        tls: Option<&ClientTls>,
        background: &Handle,
        carrier: Option<Arc<dyn Carry>>,
    ) -> Result<Self, ConnectError> {
        let bad = |reason: String| ConnectError::BadAddress {
            address: address.to_owned(),
            reason,
        };
        let way = GrpcWay::to(address, tls).map_err(|error| bad(error.to_string()))?;
        let (authority, tls) = match (
            address.strip_prefix("http://"),
            address.strip_prefix("https://"),
        ) {
            (Some(authority), _) => (authority, None),
            (None, Some(authority)) => (authority, tls),
            (None, None) => {
                return Err(bad("it does not start with http:// or https://".to_owned()));
            }
        };
        let way = way.with(|endpoint| {
            endpoint
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(PING_INTERVAL)
                .keep_alive_timeout(PING_TIMEOUT)
                .initial_stream_window_size(Some(4 << 20))
                .initial_connection_window_size(Some(16 << 20))
        });
        // The connection's tasks run on the runtime that is entered here.
        let _there = background.enter();
        let authority = authority.trim_end_matches('/');
        let told = Arc::new(AtomicBool::new(false));
        Ok(Self {
            address: address.to_owned(),
            framed: std::array::from_fn(|_| {
                let (told, credentials) = (Arc::clone(&told), credentials.clone());
                Framed::new(authority.to_owned(), spin, credentials, tls.cloned(), told)
            }),
            credentials: credentials.clone(),
            carrier,
            pool: PoolClient::new(way.lazy())
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
        })
    }

    /// Sends a message the quickest way that the master accepts. If its token was refused and the client has
    /// a newer token, the message is sent again at once. The token's file may just have been renewed.
    pub(super) async fn send<M: Message>(
        &self,
        message: M,
        sending: Sending<'_>,
    ) -> Result<M::Reply, Unanswered> {
        if self.credentials.is_none() {
            return self.send_once(message, &sending).await;
        }
        let number = self.credentials.number();
        match self.send_once(message.clone(), &sending).await {
            Err(refused)
                if is_about_the_token(refused.error.code) && self.credentials.renewed(number) =>
            {
                // This is rare, and as large as the first attempt.
                Box::pin(self.send_once(message, &sending)).await
            }
            answered => answered,
        }
    }

    async fn send_once<M: Message>(
        &self,
        message: M,
        sending: &Sending<'_>,
    ) -> Result<M::Reply, Unanswered> {
        let deadline = sending.deadline;
        let failed = |code, why: &dyn std::fmt::Display| {
            ControlError::new(
                code,
                format!("{}: {why}", status::call(M::NAME, &self.address)),
            )
        };
        if let Some(carrier) = &self.carrier {
            return self.carried(&**carrier, &message, deadline).await;
        }
        if let (Some(op), Some(known)) = (M::OP, sending.framed) {
            let greeting = || {
                let mut greeting = HelloRequest::default();
                greeting.set_caller(known.caller(None));
                greeting
            };
            let [first, ..] = &self.framed;
            let at = sending.connection % CONNECTIONS;
            let framed = self.framed.get(at).unwrap_or(first);
            let channel = framed.channel(greeting, deadline).await;
            let channel = channel.map_err(|error| Unanswered {
                error: failed(error.code, &error.message),
                sent: false,
            })?;
            if let Some(channel) = channel {
                let reply = framed::call(&channel, op, known.epoch(), &message, deadline)
                    .await
                    .inspect_err(|error| {
                        if error.code == Code::DeadlineExceeded {
                            framed.doubt();
                        }
                    })
                    .map_err(|error| failed(error.code, &error.message))?;
                let reply = M::Reply::decode(bytes::Bytes::from(reply));
                return Ok(reply.map_err(|error| failed(Code::Malformed, &error))?);
            }
        }
        let mut request = tonic::Request::new(message);
        request.set_timeout(deadline.left());
        if !self.credentials.is_none() {
            let token = self.credentials.current().token;
            let value = AsciiMetadataValue::try_from(format!("Bearer {}", token.as_str()));
            let mut value = value.map_err(|_| {
                let why = "the token has characters that no token has: look at its file";
                ControlError::new(Code::Unauthenticated, why)
            })?;
            value.set_sensitive(true);
            request.metadata_mut().insert("authorization", value);
        }
        match deadline.run(M::send(self.pool.clone(), request)).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(Unanswered {
                error: status::error(&self.address, M::NAME, &status),
                sent: !status::has_no_connection(&status),
            }),
            Err(_) => Err(ControlError::new(
                Code::DeadlineExceeded,
                format!(
                    "{}: kvmaster did not answer in time",
                    status::call(M::NAME, &self.address)
                ),
            )
            .into()),
        }
    }

    async fn carried<M: Message>(
        &self,
        carrier: &dyn Carry,
        message: &M,
        deadline: Deadline,
    ) -> Result<M::Reply, Unanswered> {
        let request = message.encode_to_vec().into();
        let failed = |code, why: &dyn std::fmt::Display| {
            ControlError::new(
                code,
                format!("{}: {why}", status::call(M::NAME, &self.address)),
            )
        };
        match deadline
            .run(carrier.carry(&self.address, M::NAME, request))
            .await
        {
            Ok(Ok(reply)) => {
                let reply = M::Reply::decode(reply);
                Ok(reply.map_err(|error| failed(Code::Malformed, &error))?)
            }
            Ok(Err(NotCarried::NoWay(why))) => Err(Unanswered {
                error: failed(Code::Unreachable, &why),
                sent: false,
            }),
            Ok(Err(NotCarried::Failed(status))) => {
                Err(status::error(&self.address, M::NAME, &status).into())
            }
            Err(_) => Err(failed(Code::DeadlineExceeded, &"no answer").into()),
        }
    }

    /// Asks which master leads.
    pub(super) async fn ask(
        &self,
        caller: Caller,
        deadline: Deadline,
    ) -> Result<ClusterReply, ControlError> {
        self.ask_for(caller, false, deadline).await
    }

    /// Asks which master leads, and for the overview if `overview` is set.
    pub(super) async fn ask_for(
        &self,
        caller: Caller,
        overview: bool,
        deadline: Deadline,
    ) -> Result<ClusterReply, ControlError> {
        let message = ClusterRequest {
            caller: Some(caller),
            overview,
        };
        let sending = Sending {
            deadline,
            framed: None,
            connection: 0,
        };
        self.send(message, sending)
            .await
            .map_err(|failed| failed.error)
    }
}
