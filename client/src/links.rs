//! Links to store nodes. A link is opened at its first use and shared by all calls. After a failure
//! it is opened again.
//!
//! There is one link per node incarnation and transport. Opening is single-flight: a call that comes while a
//! link is being opened waits for it. After a failure the next attempt is delayed. Calls that come meanwhile
//! get the last failure at once.

use crate::cache::KnownNode;
use crate::clock::{Backoff, Deadline};
use crate::counters::Counting;
use crate::options::TransportChoice;
use futures::future::BoxFuture;
use kvpool_seams::maps::HashMap;
use kvpool_transport::{Link, TransferError, TransportKind};
use kvpool_types::{Code, HostId, Incarnation};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// The time limit for opening a link.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long reads prefer other replicas after a node failed.
const DEPRIORITIZED_FOR: Duration = Duration::from_secs(2);
/// How long RDMA to a node is not used after a transfer over it failed, if another transport can be used.
const RDMA_COOLDOWN: Duration = Duration::from_secs(5);
/// How long the links to an unused incarnation are kept.
const IDLE: Duration = Duration::from_secs(300);
/// How long a transport is not tried again after a node's policy refused it to this caller.
const FORBIDDEN: Duration = Duration::from_secs(30);

/// Opens links.
pub(crate) trait Dial: Send + Sync + std::fmt::Debug {
    /// Opens a link to the incarnation that `node` names.
    fn dial(
        &self,
        node: Arc<KnownNode>,
        kind: TransportKind,
        deadline: Deadline,
    ) -> BoxFuture<'static, Result<Arc<dyn Link>, TransferError>>;
}

/// The links of one client.
#[derive(Debug)]
pub(crate) struct Links {
    dialer: Box<dyn Dial>,
    host: HostId,
    choice: TransportChoice,
    /// Whether this host has RDMA ports.
    rdma: bool,
    nodes: Mutex<HashMap<Incarnation, Arc<NodeLinks>>>,
    counting: Arc<Counting>,
}

/// The links to one incarnation.
#[derive(Debug)]
struct NodeLinks {
    shm: Lane,
    rdma: Lane,
    tcp: Lane,
    used: Mutex<Instant>,
    /// Whether a warning about this node's shared memory was logged. It is logged once for each incarnation.
    shm_failure_logged: AtomicBool,
    deprioritized_until: Mutex<Option<Instant>>,
    /// The time before which RDMA is not used.
    rdma_cooldown_until: Mutex<Option<Instant>>,
}

/// One link, which may not be open yet.
#[derive(Debug, Default)]
struct Lane {
    link: Mutex<Option<Arc<dyn Link>>>,
    opening: tokio::sync::Mutex<Opening>,
}

/// The state of the attempts to open a link.
#[derive(Default)]
struct Opening {
    backoff: Backoff,
    failed: Option<(TransferError, Instant)>,
    /// An attempt whose caller had no time left, and its deadline. The next caller continues it. A caller's
    /// short deadline proves nothing about the node.
    unfinished: Option<(Dialing, Instant)>,
}

type Dialing = BoxFuture<'static, Result<Arc<dyn Link>, TransferError>>;

impl std::fmt::Debug for Opening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opening")
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl Links {
    pub(crate) fn new(
        dialer: Box<dyn Dial>,
        host: HostId,
        choice: TransportChoice,
        rdma: bool,
        counting: Arc<Counting>,
    ) -> Self {
        Self {
            dialer,
            host,
            choice,
            rdma,
            nodes: Mutex::new(HashMap::default()),
            counting,
        }
    }

    /// The usable transports to `node`, best first.
    pub(crate) fn ways(&self, node: &KnownNode) -> &'static [TransportKind] {
        use TransportKind::{Rdma, Shm, Tcp};
        let near = node.host == self.host && !node.shm_path.is_empty();
        let rdma = self.rdma && !self.is_in_rdma_cooldown(node);
        match (self.choice, near, rdma) {
            (TransportChoice::Auto, true, true) => &[Shm, Rdma, Tcp],
            (TransportChoice::Auto, true, false) => &[Shm, Tcp],
            (TransportChoice::Auto, false, true) => &[Rdma, Tcp],
            (TransportChoice::Auto, false, false) | (TransportChoice::Tcp, ..) => &[Tcp],
            (TransportChoice::Shm, true, _) => &[Shm],
            (TransportChoice::Shm, false, _) => &[],
            (TransportChoice::Rdma, ..) => &[Rdma],
        }
    }

    /// A link to `node` over `kind`, which is opened if need be.
    pub(crate) async fn get(
        &self,
        node: &Arc<KnownNode>,
        kind: TransportKind,
        deadline: Deadline,
    ) -> Result<Arc<dyn Link>, TransferError> {
        let links = self.of(node);
        let lane = links.lane(kind);
        if let Some(link) = lane.open_link() {
            return Ok(link);
        }
        let locked = deadline.run(lane.opening.lock()).await;
        let mut opening = locked.map_err(|_| late(node, kind))?;
        if let Some(link) = lane.open_link() {
            return Ok(link);
        }
        if let Some((error, until)) = &opening.failed
            && Instant::now() < *until
        {
            return Err(error.clone());
        }
        let unfinished = opening.unfinished.take();
        let worth_while = unfinished.filter(|(_, until)| Instant::now() < *until);
        let (dialing, _) = opening
            .unfinished
            .insert(worth_while.unwrap_or_else(|| self.dialing(node, kind)));
        let Ok(dialed) = deadline.run(dialing).await else {
            return Err(late(node, kind));
        };
        opening.unfinished = None;
        match dialed {
            Ok(link) => {
                Counting::one(&self.counting.links_opened);
                *opening = Opening::default();
                *lane.link.lock() = Some(Arc::clone(&link));
                Ok(link)
            }
            Err(error) => {
                Counting::one(&self.counting.link_failures);
                let pause = match error.code {
                    // A node without RDMA has none for the life of its incarnation.
                    Code::InvalidArgument if kind == TransportKind::Rdma => IDLE,
                    // The node's policy refuses this transport to the caller until the policy changes.
                    Code::Forbidden if kind != TransportKind::Tcp => FORBIDDEN,
                    _ => opening.backoff.next(),
                };
                opening.failed = Some((error.clone(), Instant::now() + pause));
                if kind == TransportKind::Shm {
                    self.log_shm_failure(node, &links, &error);
                }
                Err(error)
            }
        }
    }

    /// Logs that shared memory of `node` cannot be used. If the node's policy refuses it to this caller, that
    /// is no fault, unless the caller requires shared memory.
    fn log_shm_failure(&self, node: &KnownNode, links: &NodeLinks, error: &TransferError) {
        if error.code == Code::Forbidden && self.choice != TransportChoice::Shm {
            tracing::debug!(
                node = %node.name, path = node.shm_path, %error,
                "a node keeps its shared memory from this caller, using another transport"
            );
        } else if !links.shm_failure_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                node = %node.name, path = node.shm_path, %error,
                "shared memory of a node on this host is not reachable, using another transport"
            );
        }
    }

    /// A new attempt to open a link, and its deadline.
    fn dialing(&self, node: &Arc<KnownNode>, kind: TransportKind) -> (Dialing, Instant) {
        let limit = Deadline::after(CONNECT_TIMEOUT);
        let dial = self.dialer.dial(Arc::clone(node), kind, limit);
        let late = late(node, kind);
        let dialing = async move {
            let dialed = limit.with_grace().run(dial).await;
            dialed.unwrap_or(Err(late))
        };
        (Box::pin(dialing), Instant::now() + CONNECT_TIMEOUT)
    }

    /// The link to `node` over `kind` if it is open.
    pub(crate) fn opened(&self, node: &KnownNode, kind: TransportKind) -> Option<Arc<dyn Link>> {
        let nodes = self.nodes.lock();
        nodes.get(&node.incarnation)?.lane(kind).open_link()
    }

    /// A link to `node` over the best transport that can be opened.
    pub(crate) async fn best(
        &self,
        node: &Arc<KnownNode>,
        deadline: Deadline,
    ) -> Result<Arc<dyn Link>, TransferError> {
        self.first(node, self.ways(node), deadline).await
    }

    /// Opens the first available transport in `ways`, in order.
    pub(crate) async fn first(
        &self,
        node: &Arc<KnownNode>,
        ways: &[TransportKind],
        deadline: Deadline,
    ) -> Result<Arc<dyn Link>, TransferError> {
        let mut last = TransferError {
            code: Code::Unreachable,
            message: format!(
                "node {} is not on this host, and the transport is set to shared memory only",
                node.name
            ),
        };
        for kind in ways {
            match self.get(node, *kind, deadline).await {
                Ok(link) => return Ok(link),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Makes reads prefer other nodes for [`DEPRIORITIZED_FOR`], because this node failed.
    pub(crate) fn deprioritize(&self, node: &KnownNode) {
        *self.of(node).deprioritized_until.lock() = Some(Instant::now() + DEPRIORITIZED_FOR);
    }

    /// Whether a failure over RDMA is a reason to use another transport: the link broke, or this process
    /// cannot register memory.
    pub(crate) const fn is_of_way(code: Code) -> bool {
        matches!(code, Code::Unreachable | Code::TooManyHeld)
    }

    /// Stops the use of RDMA to a node for [`RDMA_COOLDOWN`], because a transfer failed on an open link.
    pub(crate) fn rdma_cooldown(&self, node: &KnownNode, kind: TransportKind) {
        if kind == TransportKind::Rdma {
            *self.of(node).rdma_cooldown_until.lock() = Some(Instant::now() + RDMA_COOLDOWN);
        }
    }

    fn is_in_rdma_cooldown(&self, node: &KnownNode) -> bool {
        let nodes = self.nodes.lock();
        nodes.get(&node.incarnation).is_some_and(|links| {
            let until = *links.rdma_cooldown_until.lock();
            until.is_some_and(|until| Instant::now() < until)
        })
    }

    /// Whether reads prefer other nodes, because this node failed recently.
    pub(crate) fn is_deprioritized(&self, node: &KnownNode) -> bool {
        let links = self.nodes.lock().get(&node.incarnation).map(Arc::clone);
        links.is_some_and(|links| {
            links
                .deprioritized_until
                .lock()
                .is_some_and(|until| Instant::now() < until)
        })
    }

    fn of(&self, node: &KnownNode) -> Arc<NodeLinks> {
        let now = Instant::now();
        let mut nodes = self.nodes.lock();
        if let Some(links) = nodes.get(&node.incarnation) {
            *links.used.lock() = now;
            return Arc::clone(links);
        }
        // A new incarnation is an occasion to drop the links of unused incarnations.
        nodes.retain(|_, links| now.duration_since(*links.used.lock()) < IDLE);
        let links = Arc::new(NodeLinks {
            shm: Lane::default(),
            rdma: Lane::default(),
            tcp: Lane::default(),
            used: Mutex::new(now),
            shm_failure_logged: AtomicBool::new(false),
            deprioritized_until: Mutex::new(None),
            rdma_cooldown_until: Mutex::new(None),
        });
        nodes.insert(node.incarnation, Arc::clone(&links));
        links
    }
}

fn late(node: &KnownNode, kind: TransportKind) -> TransferError {
    TransferError {
        code: Code::DeadlineExceeded,
        message: format!("opening a {kind:?} link to {}", node.name),
    }
}

impl NodeLinks {
    const fn lane(&self, kind: TransportKind) -> &Lane {
        match kind {
            TransportKind::Shm => &self.shm,
            TransportKind::Rdma => &self.rdma,
            TransportKind::Tcp => &self.tcp,
        }
    }
}

impl Lane {
    fn open_link(&self) -> Option<Arc<dyn Link>> {
        let mut link = self.link.lock();
        if link.as_ref().is_some_and(|link| !link.is_open()) {
            *link = None;
        }
        link.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use kvpool_types::NodeName;
    use std::sync::atomic::AtomicUsize;
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    fn node(shm_path: &str) -> Arc<KnownNode> {
        Arc::new(KnownNode {
            name: NodeName("n".into()),
            incarnation: Incarnation(1),
            data_address: "n:1".into(),
            shm_path: shm_path.into(),
            host: HostId::default(),
        })
    }

    /// Dials for a while, and fails.
    #[derive(Debug, Default)]
    struct Slow(Arc<AtomicUsize>);

    impl Dial for Slow {
        fn dial(
            &self,
            _node: Arc<KnownNode>,
            _kind: TransportKind,
            _deadline: Deadline,
        ) -> BoxFuture<'static, Result<Arc<dyn Link>, TransferError>> {
            self.0.fetch_add(1, Ordering::SeqCst);
            async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                Err(TransferError {
                    code: Code::Unreachable,
                    message: "nobody listens".to_owned(),
                })
            }
            .boxed()
        }
    }

    /// Fails to dial at once.
    #[derive(Debug)]
    struct Refuses(Code);

    impl Dial for Refuses {
        fn dial(
            &self,
            _node: Arc<KnownNode>,
            _kind: TransportKind,
            _deadline: Deadline,
        ) -> BoxFuture<'static, Result<Arc<dyn Link>, TransferError>> {
            let error = TransferError {
                code: self.0,
                message: "not for you".to_owned(),
            };
            std::future::ready(Err(error)).boxed()
        }
    }

    /// Counts warnings.
    struct Warnings(Arc<AtomicUsize>);

    impl Subscriber for Warnings {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            if *event.metadata().level() == Level::WARN {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[tokio::test]
    async fn memory_that_a_policy_keeps_is_a_warning_only_for_who_asked_for_it() {
        let warnings = Arc::<AtomicUsize>::default();
        let _guard = tracing::subscriber::set_default(Warnings(Arc::clone(&warnings)));
        for (choice, code, expected) in [
            (TransportChoice::Auto, Code::Forbidden, 0),
            (TransportChoice::Shm, Code::Forbidden, 1),
            (TransportChoice::Auto, Code::Unreachable, 1),
        ] {
            let dialer = Box::new(Refuses(code));
            let links = Links::new(dialer, HostId::default(), choice, false, Arc::default());
            let deadline = Deadline::after(Duration::from_secs(5));
            let node = node("/node.sock");
            let link = links.get(&node, TransportKind::Shm, deadline);
            assert_eq!(link.await.unwrap_err().code, code);
            let logged = warnings.swap(0, Ordering::SeqCst);
            assert_eq!(logged, expected, "{choice:?} {code:?}");
        }
    }

    #[tokio::test]
    async fn an_attempt_goes_on_when_its_caller_has_no_time_left() {
        let dials = Arc::<AtomicUsize>::default();
        let links = Links::new(
            Box::new(Slow(Arc::clone(&dials))),
            HostId::default(),
            TransportChoice::Tcp,
            false,
            Arc::default(),
        );
        let node = node("");
        let open = async |time| {
            let link = links.get(&node, TransportKind::Tcp, Deadline::after(time));
            link.await.unwrap_err().code
        };
        for _ in 0..3 {
            assert_eq!(open(Duration::from_millis(5)).await, Code::DeadlineExceeded);
        }
        // A caller with time gets the outcome of the same attempt, not the failure of callers without time.
        assert_eq!(open(Duration::from_secs(5)).await, Code::Unreachable);
        assert_eq!(dials.load(Ordering::SeqCst), 1);
    }
}
