//! Raw bytes on a socket, for requests that no kvpool client sends.

use anyhow::{Context, bail};
use kvpool_types::wire::data::{Failure, Hello, HelloReply, MapRequest, Meta, Statuses};
use kvpool_types::wire::frame::{self, HEADER_BYTES, Header, Op};
use kvpool_types::{ChecksumAlgorithm, ClientId, ClusterId, Code, Epoch, Incarnation, Token};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::ErrorKind::ConnectionReset;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The body of a GET, by plain HTTP/1.1.
pub fn http_get(address: &str, path: &str) -> anyhow::Result<String> {
    let (status, body) = http_get_any(address, path)?;
    if status != 200 {
        bail!("GET {path} answered {status}: {body}");
    }
    Ok(body)
}

/// [`http_get`] whose every step ends within `limit`.
pub fn http_get_within(address: &str, path: &str, limit: Duration) -> anyhow::Result<String> {
    let stream = TcpStream::connect_timeout(&address.parse()?, limit)
        .with_context(|| format!("connect to {address}"))?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    let (status, body) = http_get_on(stream, address, path)?;
    if status != 200 {
        bail!("GET {path} answered {status}: {body}");
    }
    Ok(body)
}

/// The status and body of a GET.
pub fn http_get_any(address: &str, path: &str) -> anyhow::Result<(u16, String)> {
    http_get_on(connect(address)?, address, path)
}

fn http_get_on(stream: TcpStream, address: &str, path: &str) -> anyhow::Result<(u16, String)> {
    let mut stream = crate::trust::stream(stream, address)?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\n{}Connection: close\r\n\r\n",
        crate::trust::authorization()?
    )?;
    let mut text = Vec::new();
    let read = stream.read_to_end(&mut text);
    // A server may end TLS without a message. The body's length shows whether it is whole.
    read.or_else(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => Ok(0),
        _ => Err(error),
    })?;
    let text = String::from_utf8(text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no end of the head")?;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    Ok((status, body.to_owned()))
}

/// A TCP connection whose every read and write ends within 10 s.
pub fn connect(address: &str) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect(address).with_context(|| format!("connect to {address}"))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.set_write_timeout(Some(Duration::from_secs(10)))?;
    Ok(stream)
}

/// A connection to a data port or a Unix socket that sends exactly the given bytes.
#[derive(Debug)]
pub struct Port<S> {
    stream: S,
    next: u64,
}

/// One received frame: its header, meta and payload.
pub type Received = (Header, Vec<u8>, Vec<u8>);

impl Port<TcpStream> {
    /// Connects to a data port, without a hello.
    pub fn open(address: &str) -> anyhow::Result<Self> {
        Ok(Self {
            stream: connect(address)?,
            next: 1,
        })
    }
}

impl Port<UnixStream> {
    /// Connects to a Unix socket, without a hello.
    pub fn open_unix(path: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        Ok(Self { stream, next: 1 })
    }

    /// Requests a segment's memory, and returns the descriptor of the answer.
    pub fn map(&mut self, epoch: Epoch, request: &MapRequest) -> anyhow::Result<OwnedFd> {
        self.send(Op::Map, epoch, &request.to_bytes(), &[])?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; 512];
        let received = recvmsg(
            &self.stream,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::empty(),
        )?;
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        });
        descriptor.with_context(|| format!("{} bytes and no descriptor", received.bytes))
    }
}

impl<S: Read + Write> Port<S> {
    /// Sends a hello as a client of `cluster`, and returns the node's answer.
    pub fn hello(&mut self, cluster: ClusterId) -> anyhow::Result<HelloReply> {
        self.hello_with(cluster, Token::default())?
            .map_err(|failure| anyhow::anyhow!("hello answered by {failure:?}"))
    }

    /// Sends a hello with a token, and returns the node's answer or refusal.
    pub fn hello_with(
        &mut self,
        cluster: ClusterId,
        token: Token,
    ) -> anyhow::Result<Result<HelloReply, Failure>> {
        let hello = Hello {
            min_version: frame::MIN_VERSION,
            max_version: frame::VERSION,
            cluster,
            client: ClientId(0x7e57),
            incarnation: Incarnation(0),
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
            token,
        };
        let (header, meta, _) = self.ask(Op::Hello, Epoch(0), &hello.to_bytes(), &[])?;
        match header.op {
            Op::HelloReply => Ok(Ok(HelloReply::decode(&meta)?)),
            Op::Failure => Ok(Err(Failure::decode(&meta)?)),
            other => bail!("hello answered by {other:?}"),
        }
    }

    /// Sends a frame.
    pub fn send(
        &mut self,
        op: Op,
        epoch: Epoch,
        meta: &[u8],
        payload: &[u8],
    ) -> anyhow::Result<()> {
        self.announce(op, epoch, meta, payload.len() as u64)?;
        self.bytes(payload)
    }

    /// Sends a frame's head that announces a payload of `payload` bytes, without the payload.
    pub fn announce(
        &mut self,
        op: Op,
        epoch: Epoch,
        meta: &[u8],
        payload: u64,
    ) -> anyhow::Result<()> {
        let request = self.next;
        self.next += 1;
        let length = u32::try_from(meta.len())?;
        let header = Header {
            version: frame::VERSION,
            op,
            request,
            epoch,
            meta: length,
            payload,
        };
        self.bytes(&header.encode())?;
        self.bytes(meta)
    }

    /// Sends these bytes unchanged.
    pub fn bytes(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(self.stream.write_all(bytes)?)
    }

    /// Receives a frame.
    pub fn receive(&mut self) -> anyhow::Result<Received> {
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head)?;
        let header = Header::decode(&head)?;
        let mut meta = vec![0; usize::try_from(header.meta)?];
        self.stream.read_exact(&mut meta)?;
        let mut payload = vec![0; usize::try_from(header.payload)?];
        self.stream.read_exact(&mut payload)?;
        Ok((header, meta, payload))
    }

    /// Sends a frame and receives the answer.
    pub fn ask(
        &mut self,
        op: Op,
        epoch: Epoch,
        meta: &[u8],
        payload: &[u8],
    ) -> anyhow::Result<Received> {
        self.send(op, epoch, meta, payload)?;
        self.receive()
    }

    /// Sends a frame for several items, and returns their codes.
    pub fn codes(
        &mut self,
        op: Op,
        epoch: Epoch,
        meta: &[u8],
        payload: &[u8],
    ) -> anyhow::Result<Vec<Code>> {
        let (header, meta, _) = self.ask(op, epoch, meta, payload)?;
        match header.op {
            Op::Statuses => Ok(Statuses::decode(&meta)?.0),
            Op::Failure => bail!("{:?}", Failure::decode(&meta)?),
            other => bail!("answered by {other:?}"),
        }
    }

    /// Whether the other side has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        matches!(self.stream.read(&mut byte), Ok(0))
            || matches!(self.stream.read(&mut byte), Err(e) if e.kind() == ConnectionReset)
    }
}
