//! Slightly wrong handshakes, tokens and requests, at every port of a pool with TLS and tokens.
//!
//! No daemon panics or accepts a changed token. Memory stays bounded, and a good client is served
//! meanwhile. Each changed gRPC call gets an answer, and no answer reveals anything about another
//! namespace.
//!
//! `KVPOOL_FUZZ` sets the number of inputs in all (50 000), and `KVPOOL_FUZZ_SEED` another seed.

use kvpool_client::{Client, Key, Namespace};
use kvpool_proto as proto;
use kvpool_tests::blocks::{check_all, put_all};
use kvpool_tests::calls::{self, Answer};
use kvpool_tests::fuzz::{Corpus, cases, seed};
use kvpool_tests::guard::{Tokens, flags, world};
use kvpool_tests::raw::Port;
use kvpool_tests::requests::{self, frame};
use kvpool_tests::{Cluster, Options, trust};
use kvpool_tls::grpc::GrpcWay;
use kvpool_tls::rustls::{ClientConfig, ClientConnection, StreamOwned};
use kvpool_tls::{ALPN_HTTP, ClientTls};
use kvpool_types::wire::data::{Hello, Meta};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op, VERSION};
use kvpool_types::{ClusterId, Epoch, Incarnation, Token};
use kvpool_types::{NamespaceSettings, Setting};
use parking_lot::Mutex;
use prost::Message;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tonic::codegen::http;
use tonic::transport::Channel;

/// The number of inputs in a usual run.
const USUALLY: u64 = 50_000;
/// The longest wait for one answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// The number of frames on one connection.
const FRAMES: u64 = 8;
/// The most bytes by which the daemons may grow together.
const GROWTH: u64 = 96 << 20;

type Sealed = StreamOwned<ClientConnection, TcpStream>;

/// The addresses of the pool, and the knowledge of a good caller.
struct Target {
    master: String,
    master_http: String,
    node: String,
    node_http: String,
    socket: PathBuf,
    cluster: ClusterId,
    tls: ClientTls,
    token: String,
    /// Tokens that every port refuses.
    bad: Vec<Vec<u8>>,
}

fn socket(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

impl Target {
    fn sealed(&self, address: &str, config: Arc<ClientConfig>) -> Sealed {
        let name = self.tls.name_of(address).unwrap();
        let connection = ClientConnection::new(config, name).unwrap();
        StreamOwned::new(connection, socket(address))
    }

    fn http(&self) -> Arc<ClientConfig> {
        let mut config = (*self.tls.grpc()).clone();
        config.alpn_protocols = vec![ALPN_HTTP.to_vec()];
        Arc::new(config)
    }

    fn hello(&self, token: &str) -> Vec<u8> {
        let hello = Hello {
            min_version: 1,
            max_version: VERSION,
            cluster: self.cluster,
            client: 77.into(),
            incarnation: Incarnation(0),
            checksum_algorithm: 1,
            token: Token::from(token.to_owned()),
        };
        frame(Op::Hello, Epoch(0), &hello.to_bytes(), &[])
    }

    fn greeting(&self, token: &[u8]) -> Vec<u8> {
        let mut message = proto::HelloRequest {
            min_version: 1,
            max_version: 2,
            caller: Some(caller()),
            // As long as the bytes below, which may not be text.
            token: "x".repeat(token.len()),
            ..Default::default()
        }
        .encode_to_vec();
        let at = message.len() - token.len();
        message[at..].copy_from_slice(token);
        frame(Op::Greet, Epoch(0), &message, &[])
    }
}

fn caller() -> proto::Caller {
    proto::Caller {
        client_id: vec![1; 16].into(),
        host_id: vec![2; 16].into(),
        ..Default::default()
    }
}

/// Reads until the daemon closes the connection.
fn hear_out(mut stream: impl Read) {
    let mut scratch = [0; 16 << 10];
    loop {
        match stream.read(&mut scratch) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                let is_silent = error.kind() == std::io::ErrorKind::WouldBlock;
                assert!(!is_silent, "a connection is neither answered nor ended");
                return;
            }
        }
    }
}

/// Sends bytes in a session, and waits until the daemon has ended it.
fn converse(mut stream: Sealed, words: &[u8]) {
    // The daemon may close the connection before it has read everything.
    let _said = stream.write_all(words);
    stream.conn.send_close_notify();
    let _said = stream.flush();
    let _said = stream.sock.shutdown(Shutdown::Write);
    hear_out(&stream.sock);
}

/// The first bytes of each kind of client.
fn client_hellos(target: &Target) -> Vec<Vec<u8>> {
    let configs = [target.tls.frames(), target.tls.grpc(), target.http()];
    let hellos = configs.into_iter().map(|config| {
        let name = target.tls.name_of("localhost:1").unwrap();
        let mut connection = ClientConnection::new(config, name).unwrap();
        let mut hello = Vec::new();
        while connection.wants_write() {
            connection.write_tls(&mut hello).unwrap();
        }
        hello
    });
    hellos.collect()
}

fn handshakes(target: &Target, count: u64, made: &AtomicU64) {
    let ports = [
        &target.master,
        &target.master_http,
        &target.node,
        &target.node_http,
    ];
    let mut corpus = Corpus::load("handshakes", client_hellos(target)).unwrap();
    for (_, port) in (0..count).zip(ports.into_iter().cycle()) {
        let mut stream = socket(port);
        // The daemon may have closed already.
        let _cut = stream.write_all(&corpus.mutate());
        drop(stream);
        made.fetch_add(1, Ordering::Relaxed);
    }
}

/// The answer to a frame; `None` when the connection ends.
fn ask(stream: &mut (impl Read + Write), words: &[u8]) -> Option<Op> {
    stream.write_all(words).ok()?;
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).ok()?;
    let header = Header::decode(&head).unwrap();
    let mut meta = vec![0; usize::try_from(header.meta).unwrap()];
    stream.read_exact(&mut meta).ok()?;
    Some(header.op)
}

fn tokens(target: &Target, count: u64, made: &AtomicU64) {
    let good = target.token.as_bytes().to_vec();
    let seeds = [vec![good.clone()], target.bad.clone()].concat();
    let mut corpus = Corpus::load("tokens", seeds).unwrap();
    let mut open: Option<Sealed> = None;
    let mut number = 0;
    while number < count {
        let mutated = corpus.mutate();
        if mutated.trim_ascii() == good {
            continue;
        }
        number += 1;
        made.fetch_add(1, Ordering::Relaxed);
        let text = String::from_utf8_lossy(&mutated);
        let taken = match number % 20 {
            0 | 10 => {
                let address = if number % 40 < 20 {
                    &target.master_http
                } else {
                    &target.node_http
                };
                let mut stream = target.sealed(address, target.http());
                let request = b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer ";
                // A line end inside the value would begin the next header.
                let value: Vec<u8> = mutated
                    .iter()
                    .copied()
                    .filter(|byte| !b"\r\n".contains(byte))
                    .collect();
                if value.trim_ascii() == good {
                    continue;
                }
                let words = [request, &value[..], b"\r\n\r\n"].concat();
                let mut status = [0; 12];
                let answered = stream
                    .write_all(&words)
                    .and_then(|()| stream.read_exact(&mut status));
                answered.is_ok() && status.ends_with(b"200")
            }
            5 => {
                let mut stream = target.sealed(&target.node, target.tls.frames());
                ask(&mut stream, &target.hello(&text)) == Some(Op::HelloReply)
            }
            other if other % 2 == 0 => {
                let mut stream = UnixStream::connect(&target.socket).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                ask(&mut stream, &target.hello(&text)) == Some(Op::HelloReply)
            }
            // An accepted connection to the master sends another token.
            _ => {
                let stream = open.get_or_insert_with(|| {
                    let mut stream = target.sealed(&target.master, target.tls.frames());
                    let let_in = ask(&mut stream, &target.greeting(&good));
                    assert_eq!(let_in, Some(Op::Reply), "a good token is refused");
                    stream
                });
                match ask(stream, &target.greeting(&mutated)) {
                    None => {
                        open = None;
                        false
                    }
                    answer => answer == Some(Op::Reply),
                }
            }
        };
        assert!(!taken, "a changed token is taken: {text:?}");
    }
}

fn attack(target: &Target, count: u64, made: &AtomicU64) {
    let mut life = Port::open_unix(&target.socket).unwrap();
    let life = life.hello_with(target.cluster, Token::from(target.token.clone()));
    let life = life.unwrap().unwrap().incarnation;
    let http = b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".to_vec();
    let load = |seeds| Corpus::load("guarded", seeds).unwrap();
    let mut data = load(requests::of_data_port(Epoch(1), life));
    let calls = requests::of_master(&caller()).into_iter();
    let calls = calls.map(|(op, _, message)| frame(op, Epoch(1), &message, &[]));
    let mut control = load(calls.collect());
    let mut plain = load(vec![http, target.greeting(target.token.as_bytes())]);
    let mut number = 0;
    while number < count {
        let corpus = match number / FRAMES % 8 {
            0..=2 => &mut data,
            3..=6 => &mut control,
            _ => &mut plain,
        };
        let mutated = (0..FRAMES)
            .flat_map(|_| corpus.mutate())
            .collect::<Vec<_>>();
        match number / FRAMES % 8 {
            0 => {
                let words = [target.hello(&target.token), mutated].concat();
                converse(target.sealed(&target.node, target.tls.frames()), &words);
            }
            1 | 2 => {
                let mut stream = UnixStream::connect(&target.socket).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                let words = [target.hello(&target.token), mutated].concat();
                let _said = stream
                    .write_all(&words)
                    .and_then(|()| stream.shutdown(Shutdown::Write));
                hear_out(stream);
            }
            3..=6 => {
                let greeting = target.greeting(target.token.as_bytes());
                let words = [greeting, mutated].concat();
                converse(target.sealed(&target.master, target.tls.frames()), &words);
            }
            _ => converse(target.sealed(&target.master_http, target.http()), &mutated),
        }
        number += FRAMES;
        made.fetch_add(FRAMES, Ordering::Relaxed);
    }
}

/// The namespace whose blocks a caller of [`OWN`] may not learn of.
const FOREIGN: &str = "foreign";
/// The namespace of the caller `other`, which is empty.
const OWN: &str = "elsewhere";
/// A part of a key of [`FOREIGN`] that no request names.
const MARK: &[u8] = b"marked-4f1c86ab";
/// How long a put may wait for room.
const WAIT: Duration = Duration::from_secs(1);
/// The number of concurrent calls.
const AT_ONCE: u64 = 8;

fn foreign_keys() -> Vec<Key> {
    let names = (0..3).map(|number| format!("known-{number}"));
    names.map(|name| Key::parse(&name).unwrap()).collect()
}

fn foreign_block() -> Vec<u8> {
    (0..5000u32).map(|at| at.to_le_bytes()[0]).collect()
}

/// Makes a client of [`FOREIGN`], whose blocks are present, and an empty namespace [`OWN`] with a
/// quota.
async fn fill_foreign(cluster: &Cluster) -> Client {
    let mut options = cluster.client_options();
    options.namespace = Namespace {
        name: FOREIGN.to_owned(),
        ..Default::default()
    };
    let client = Client::connect(options).await.unwrap();
    let unknown = Key::parse(std::str::from_utf8(MARK).unwrap()).unwrap();
    for key in foreign_keys().iter().chain([&unknown]) {
        client.put(key, foreign_block()).await.unwrap();
    }
    let own = Namespace {
        name: OWN.to_owned(),
        ..Default::default()
    };
    // The quota leaves room for good clients beside the calls' reservations.
    let quota = NamespaceSettings::default().with(Setting::MemoryHard, 4 << 20);
    client.create_namespace(own, &quota).await.unwrap();
    client
}

/// Makes valid and changed calls over gRPC.
#[derive(Clone)]
struct Caller {
    channel: Channel,
    master: String,
    token: String,
    /// Every call, for blocks of its own namespace and of the foreign one.
    seeds: Vec<(String, Vec<u8>)>,
}

/// One call.
struct Call {
    path: String,
    headers: Vec<(&'static str, Vec<u8>)>,
    body: Vec<u8>,
    /// Whether its token is the caller's.
    is_known: bool,
}

impl Caller {
    fn good(&self, path: &str, message: &[u8]) -> Call {
        let token = format!("Bearer {}", self.token);
        Call {
            path: path.to_owned(),
            headers: vec![
                ("content-type", b"application/grpc".to_vec()),
                ("te", b"trailers".to_vec()),
                ("authorization", token.into_bytes()),
            ],
            body: calls::body_of(message),
            is_known: true,
        }
    }

    /// `None` if HTTP/2 cannot carry the call.
    fn head(&self, call: &Call) -> Option<http::request::Builder> {
        let mut head = http::Request::post(format!("http://{}{}", self.master, call.path));
        for (name, value) in &call.headers {
            head = head.header(*name, http::HeaderValue::from_bytes(value).ok()?);
        }
        head.uri_ref().is_some().then_some(head)
    }

    /// `None` if HTTP/2 cannot carry the call, if the call's own timeout ends it, or if it waits
    /// for room as requested.
    async fn make(&self, call: &Call) -> Option<Answer> {
        let head = self.head(call)?;
        let asked = calls::ask(&self.channel, head, call.body.clone());
        let waits = call.path.ends_with("/Reserve");
        let patience = if waits { WAIT } else { PATIENCE };
        match tokio::time::timeout(patience, asked).await {
            Ok(Ok(answer)) => Some(answer),
            // The channel itself ends a call at the call's timeout.
            Ok(Err(_)) if call.headers.iter().any(|(name, _)| *name == "grpc-timeout") => None,
            Ok(Err(error)) => panic!("{}: {error:#}\n{:?}", call.path, call.body),
            Err(_) if waits => None,
            Err(_) => panic!("{} has no answer: {:?}", call.path, call.body),
        }
    }
}

/// Changes calls, one after the other. A seed always gives the same calls.
struct Mutator {
    caller: Caller,
    /// The message of each seed.
    messages: Vec<Corpus>,
    random: StdRng,
}

impl Mutator {
    fn new(caller: &Caller) -> Self {
        let messages = caller.seeds.iter().map(|(_, message)| {
            let only = vec![message.clone()];
            Corpus::load("grpc-calls", only).unwrap()
        });
        Self {
            caller: caller.clone(),
            messages: messages.collect(),
            random: StdRng::seed_from_u64(seed()),
        }
    }

    /// A call that differs from a good call in its message, frame, path or headers.
    fn mutate(&mut self) -> Call {
        let Self {
            caller,
            messages,
            random,
        } = self;
        let at = random.random_range(0..messages.len());
        let (path, message) = &caller.seeds[at];
        let (other_path, other) = caller.seeds.choose(random).unwrap();
        let mut call = caller.good(path, message);
        match random.random_range(0..10) {
            0..=4 => call.body = calls::body_of(&messages[at].mutate()),
            // Duplicate fields, and the fields of another call.
            5 => call.body = calls::body_of(&[&message[..], other].concat()),
            6 => {
                let at = random.random_range(0..call.body.len());
                match random.random_range(0..5) {
                    0 => call.body[0] = random.random(),
                    1 => call.body[at] ^= 1 << random.random_range(0..8),
                    2 => call.body.truncate(at),
                    3 => call.body.extend(vec![0; 1 + at]),
                    _ => call.body.extend(calls::body_of(other)),
                }
            }
            7 => {
                call.path = match random.random_range(0..6) {
                    0 => other_path.clone(),
                    1 => "/kvpool.v1.Nodes/Session".to_owned(),
                    2 => path.to_lowercase(),
                    3 => format!("{path}/"),
                    4 => path.replacen("Pool", "Pool%2e", 1),
                    _ => path[..random.random_range(1..path.len())].to_owned(),
                }
            }
            8 => {
                call.is_known = false;
                let value = &mut call.headers[2].1;
                match random.random_range(0..4) {
                    0 => value.clear(),
                    1 => value.truncate(random.random_range(0..value.len())),
                    2 => {
                        let at = random.random_range(7..value.len());
                        let other = *b"AbCdEf0189_-".choose(random).unwrap();
                        call.is_known = value[at] == other;
                        value[at] = other;
                    }
                    _ => value.splice(..7, *b"Basic x").for_each(drop),
                }
            }
            _ => {
                let others: [(&str, &[u8]); 10] = [
                    ("content-type", b"text/html"),
                    ("content-type", b"application/grpc+json"),
                    ("content-type", b""),
                    ("grpc-timeout", b"1n"),
                    ("grpc-timeout", b"99999999H"),
                    ("grpc-timeout", b"soon"),
                    ("grpc-encoding", b"gzip"),
                    ("grpc-accept-encoding", b"gzip,deflate"),
                    ("kvpool-code", b"0"),
                    ("traceparent", &[b'0'; 4000]),
                ];
                let (name, value) = *others.choose(random).unwrap();
                call.headers.retain(|(known, _)| *known != name);
                call.headers.push((name, value.to_vec()));
            }
        }
        call
    }
}

/// Makes changed calls, and counts the answers by status.
async fn call(
    mutator: Arc<Mutex<Mutator>>,
    count: u64,
    made: Arc<AtomicU64>,
) -> BTreeMap<String, u64> {
    let caller = mutator.lock().caller.clone();
    let mut answers = BTreeMap::new();
    for _ in 0..count {
        let call = mutator.lock().mutate();
        made.fetch_add(1, Ordering::Relaxed);
        let Some(answer) = caller.make(&call).await else {
            *answers.entry("none".to_owned()).or_default() += 1;
            continue;
        };
        let told = calls::gives_away(&call.path, &answer, OWN).unwrap();
        assert_eq!(told, None, "{:?}", call.body);
        let is_marked = answer.all.windows(MARK.len()).any(|part| part == MARK);
        assert!(!is_marked, "{}: {:?}", call.path, call.body);
        let is_refused = answer.grpc != Some(0);
        assert!(call.is_known || is_refused, "a changed token is taken");
        let status = answer
            .grpc
            .map_or("http", |grpc| if grpc == 0 { "ok" } else { "grpc" });
        let code = answer.grpc.map_or(answer.http.into(), |grpc| grpc);
        *answers.entry(format!("{status} {code}")).or_default() += 1;
    }
    answers
}

/// The calls whose answers contain blocks, nodes or namespaces.
const TELLING: [&str; 8] = [
    "Cluster",
    "Describe",
    "Exist",
    "List",
    "ListNamespaces",
    "Lookup",
    "MatchPrefix",
    "Stats",
];

/// Makes the unchanged calls. The caller of [`OWN`] learns nothing by them, and `root` learns
/// everything. So the search for secrets in answers works.
async fn try_seeds(other: &Caller, root: &Caller) {
    let mut told = Vec::new();
    for (path, message) in &other.seeds {
        let answer = other.make(&other.good(path, message)).await.unwrap();
        let given = calls::gives_away(path, &answer, OWN).unwrap();
        assert_eq!(given, None, "{path}");
        let name = path.rsplit('/').next().unwrap();
        if TELLING.contains(&name) {
            let answer = root.make(&root.good(path, message)).await.unwrap();
            let given = calls::gives_away(path, &answer, OWN).unwrap();
            if given.is_some() {
                told.push(name);
            }
        }
    }
    told.sort_unstable();
    told.dedup();
    assert_eq!(told, TELLING, "an answer to root gives nothing away");
}

/// Reports that the attack has ended.
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn start(tokens: &Tokens) -> Cluster {
    let own = flags(&world().daemon, &[]);
    Cluster::start(Options {
        nodes: 1,
        master: [own.clone(), tokens.flags()].concat(),
        node: [own, tokens.node_flags()].concat(),
        ..Options::default()
    })
    .unwrap()
}

async fn serves(client: &Client) {
    put_all(client, 0..4, 100_000).await.unwrap();
    assert_eq!(check_all(client, 0..4, 100_000).await.right, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn mutated_handshakes_tokens_and_requests_hurt_nobody() {
    let issuer = Tokens::new().unwrap();
    let cluster = start(&issuer);
    let client = cluster.client().await.unwrap();
    serves(&client).await;
    let claims = issuer.token_with(&json!({}), false).unwrap();
    let claims = claims.split('.').nth(1).unwrap();
    let ended = json!({ "exp": kvpool_auth::now() - 60 });
    let target = Target {
        master: cluster.master.listen.clone(),
        master_http: cluster.master.http.clone(),
        node: cluster.nodes[0].listen.clone(),
        node_http: cluster.nodes[0].http.clone(),
        socket: cluster.node_socket(0),
        cluster: client.cluster_id(),
        tls: ClientTls::open(&trust::trusted()).unwrap().unwrap(),
        token: issuer.token_with(&json!({}), false).unwrap(),
        bad: vec![
            issuer.token_with(&ended, false).unwrap().into_bytes(),
            issuer.token_with(&json!({}), true).unwrap().into_bytes(),
            format!("eyJhbGciOiJub25lIn0.{claims}.").into_bytes(),
            format!("eyJhbGciOiJIUzI1NiJ9.{claims}.AAAA").into_bytes(),
        ],
    };
    let foreign = fill_foreign(&cluster).await;
    let seeds = [OWN, FOREIGN].map(|namespace| {
        let caller = proto::Caller {
            cluster_id: client.cluster_id().to_bytes().to_vec().into(),
            epoch: client.epoch().0,
            namespace: namespace.to_owned(),
            ..caller()
        };
        requests::of_every_call(&caller, &foreign_keys())
    });
    let way = GrpcWay::to(&cluster.master_url(), Some(&target.tls)).unwrap();
    let root = Caller {
        channel: way.connect().await.unwrap(),
        master: cluster.master.listen.clone(),
        token: target.token.clone(),
        seeds: seeds.concat(),
    };
    let other = Caller {
        token: issuer.token("other", 3600).unwrap(),
        ..root.clone()
    };
    try_seeds(&other, &root).await;
    let count = cases(USUALLY);
    let (made, over) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let daemons = [&cluster.master, &cluster.nodes[0]];
    let resident = || -> u64 {
        let each = daemons
            .iter()
            .map(|daemon| daemon.resident_bytes().unwrap());
        each.sum()
    };
    let (before, pids, begun) = (resident(), daemons.map(|d| d.pid()), Instant::now());
    let good = async {
        let mut rounds = 0;
        while !over.load(Ordering::Relaxed) {
            serves(&client).await;
            // A new client.
            serves(&cluster.client().await.unwrap()).await;
            rounds += 1;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        rounds
    };
    let attack = {
        let (made, over) = (Arc::clone(&made), Arc::clone(&over));
        tokio::task::spawn_blocking(move || {
            // Even if an attacker panics.
            let _over = Over(over);
            std::thread::scope(|scope| {
                scope.spawn(|| handshakes(&target, count * 2 / 5, &made));
                scope.spawn(|| tokens(&target, count / 5, &made));
                scope.spawn(|| attack(&target, count * 3 / 10, &made));
            });
        })
    };
    let mutator = Arc::new(Mutex::new(Mutator::new(&other)));
    let callers = (0..AT_ONCE).map(|_| {
        let count = (count / 10).div_ceil(AT_ONCE);
        tokio::spawn(call(Arc::clone(&mutator), count, Arc::clone(&made)))
    });
    let callers: Vec<_> = callers.collect();
    let rounds = good.await;
    attack.await.unwrap();
    let mut answers = BTreeMap::<String, u64>::new();
    for caller in callers {
        for (status, count) in caller.await.unwrap() {
            *answers.entry(status).or_default() += count;
        }
    }
    println!("answers to changed calls over gRPC: {answers:?}");
    assert!(answers.contains_key("ok 0"), "{answers:?}");
    let made = made.load(Ordering::Relaxed);
    println!(
        "{made} cases in {:?}, {rounds} rounds of good clients",
        begun.elapsed()
    );
    assert!(made >= count, "{made}");
    serves(&client).await;
    for key in foreign_keys() {
        assert_eq!(foreign.get(&key).await.unwrap(), Some(foreign_block()));
    }
    let grown = resident().saturating_sub(before);
    println!("the daemons have grown by {} KiB", grown >> 10);
    assert!(grown < GROWTH, "the daemons have grown by {grown} bytes");
    for (daemon, pid) in daemons.into_iter().zip(pids) {
        assert_eq!(daemon.pid(), pid);
        assert!(
            !daemon.log_text().contains("panicked"),
            "{}",
            daemon.log_text()
        );
        assert_eq!(daemon.http_get("/healthz").unwrap(), "ok\n");
    }
}
