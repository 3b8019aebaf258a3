"""/v1/signing_key"""

from fastapi import APIRouter

from app.auth import KeyedRoute, ProjectId
from app.manifests import signing
from app.manifests.schemas import SigningKeyOut

router = APIRouter(prefix="/v1/signing_key", tags=["Manifests"], route_class=KeyedRoute)


@router.get("", summary="The public key of manifests")
def retrieve_signing_key(project_id: ProjectId) -> SigningKeyOut:
    """Keep it where results are checked: `tuneyard verify FOLDER --public-key FILE` takes it as PEM or as this answer."""
    return SigningKeyOut(public_key=signing.public_key_pem())
