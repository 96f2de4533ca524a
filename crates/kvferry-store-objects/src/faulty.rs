//! An object store in memory that fails as a test wants.

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use kvferry_sys::sync::Mutex;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// A fault that is injected into a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The request takes longer.
    Late(Duration),
    /// The server says no.
    Error,
    /// There is no answer.
    Hang,
    /// The body ends early, without an error.
    Cut,
    /// The body ends early, with an error.
    Broken,
    /// A bit of the body changes.
    Flip,
    /// The body is another object's.
    Swap,
    /// Objects can't be written on condition that they do not exist.
    Unconditional,
    /// The user may not do this.
    Refused,
    /// The user may not find out which objects there are.
    RefusedIfAbsent,
    /// There is no such bucket.
    NoBucket,
}

/// Decides what becomes of each request, by its number.
type Script = dyn Fn(usize) -> Option<Fault> + Send + Sync;

#[derive(Clone)]
pub(crate) struct Faulty {
    pub(crate) inner: Arc<InMemory>,
    script: Arc<Mutex<Arc<Script>>>,
    pub(crate) requests: Arc<AtomicUsize>,
}

impl Faulty {
    pub(crate) fn new(script: impl Fn(usize) -> Option<Fault> + Send + Sync + 'static) -> Self {
        Self {
            inner: Arc::default(),
            script: Arc::new(Mutex::new(Arc::new(script))),
            requests: Arc::default(),
        }
    }

    pub(crate) fn set(&self, script: impl Fn(usize) -> Option<Fault> + Send + Sync + 'static) {
        *self.script.lock() = Arc::new(script);
    }

    /// Has the request fail or wait. Returns what is to become of its body.
    async fn fault(&self) -> Result<Option<Fault>> {
        let number = self.requests.fetch_add(1, SeqCst);
        let script = Arc::clone(&self.script.lock());
        match script(number) {
            Some(Fault::Late(time)) => {
                tokio::time::sleep(time).await;
                Ok(None)
            }
            Some(Fault::Error) => Err(failed("503")),
            Some(Fault::Refused) => Err(refused()),
            Some(Fault::NoBucket) => {
                let answer = "404: <Error><Code>NoSuchBucket</Code></Error>";
                Err(Error::NotFound { path: "x".into(), source: answer.into() })
            }
            Some(Fault::Hang) => std::future::pending().await,
            other => Ok(other),
        }
    }

    async fn another_than(&self, location: &Path) -> Result<Bytes> {
        let mut listed = self.inner.list(None);
        while let Some(Ok(meta)) = listed.next().await {
            if meta.location != *location {
                return self
                    .inner
                    .get_opts(&meta.location, GetOptions::default())
                    .await?
                    .bytes()
                    .await;
            }
        }
        Ok(Bytes::new())
    }
}

fn failed(what: &str) -> Error {
    Error::Generic { store: "faulty", source: what.to_owned().into() }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let fault = self.fault().await?;
        if fault == Some(Fault::Unconditional) && options.mode == PutMode::Create {
            return Err(Error::NotImplemented {
                operation: "a conditional write".into(),
                implementer: "faulty".into(),
            });
        }
        self.inner.put_opts(location, payload, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let fault = self.fault().await?;
        let found = self.inner.get_opts(location, options).await;
        let found = match (found, fault) {
            (Err(Error::NotFound { .. }), Some(Fault::RefusedIfAbsent)) => return Err(refused()),
            (found, _) => found?,
        };
        let (meta, range) = (found.meta.clone(), found.range.clone());
        let attributes = found.attributes.clone();
        let body = found.bytes().await?;
        let half = body.slice(..body.len() / 2);
        let pieces = match fault {
            Some(Fault::Cut) => vec![Ok(half)],
            Some(Fault::Broken) => vec![Ok(half), Err(failed("the connection was reset"))],
            Some(Fault::Flip) => {
                let mut flipped = body.to_vec();
                let middle = flipped.len() / 2;
                flipped[middle] ^= 0x10;
                vec![Ok(flipped.into())]
            }
            Some(Fault::Swap) => vec![Ok(self.another_than(location).await?)],
            _ => vec![Ok(body)],
        };
        let payload = GetResultPayload::Stream(stream::iter(pieces).boxed());
        Ok(GetResult { payload, meta, range, attributes, extensions: Default::default() })
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(failed("not used"))
    }

    fn delete_stream(
        &self,
        _: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        stream::empty().boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(failed("not used"))
    }
}

fn refused() -> Error {
    let answer = "403: <Error><Code>AccessDenied</Code></Error>";
    Error::PermissionDenied { path: "x".into(), source: answer.into() }
}
